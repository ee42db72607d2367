"""What a page carries within itself: packed data, the plotting library, its own scripts.

All of it is letters and digits, or a script of this package: nothing that came out of a model or a
prompt stands in a page as it is.
"""

import base64
import hashlib
import importlib.util
import re
import zlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from entropix_jax.errors import UserError

_STATIC = files("entropix_jax.report") / "static"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class)\b)", re.MULTILINE)


def packed(chunks: Iterable[bytes]) -> str:
    """Bytes compressed (zlib) and in base64; a browser's DecompressionStream reads it back."""
    # A level that is fast enough for a long trace; 9 saves another per cent.
    compressor = zlib.compressobj(6)
    parts = [compressor.compress(chunk) for chunk in chunks]
    return base64.b64encode(b"".join([*parts, compressor.flush()])).decode()


def plotly_source() -> bytes:
    """The plotting library for the browser, as the Python package of that name brings it along.

    Raises:
        UserError: it is not installed.
    """
    # Looked up, not imported: the Python half is not needed, and slow.
    spec = importlib.util.find_spec("plotly")
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder) / "package_data" / "plotly.min.js"
        if source.is_file():
            return source.read_bytes()
    raise UserError("the package plotly is not installed: pip install 'plotly>=6'")


def style(names: Sequence[str]) -> str:
    """Style sheets of `static/`, one after the other."""
    return "\n".join((_STATIC / f"{name}.css").read_text("utf-8") for name in names)


def script(name: str) -> str:
    """A module of `static/` and all that it imports as one script, each before who needs it.

    A page that is opened from disk can import nothing, so imports and exports are dropped: names
    at the top of the modules must differ.
    """
    done: dict[str, str] = {}

    def add(module: str) -> None:
        if module in done:
            return
        text = (_STATIC / f"{module}.js").read_text("utf-8")
        for other in _IMPORT.findall(text):
            add(other)
        done[module] = f"// {module}.js\n\n" + _EXPORT.sub("", _IMPORT.sub("", text)).strip()

    add(name)
    return "\n\n" + "\n\n".join(done.values()) + "\n"


def digest(source: str | bytes) -> str:
    """What a content security policy calls a script by."""
    source = source.encode() if isinstance(source, str) else source
    return f"'sha256-{base64.b64encode(hashlib.sha256(source).digest()).decode()}'"
