"""What a page carries besides its text: compressed data, the plotting library, its own scripts.

Payloads are base64 and scripts are this package's, so no text of a model or prompt can break out.
"""

import base64
import hashlib
import importlib.util
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from entropix_jax.errors import UserError
from entropix_jax.report.tokens import STATIC

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class)\b)", re.MULTILINE)


def pack(chunks: Iterable[bytes]) -> str:
    """Bytes as base64 of a zlib stream, which a browser's DecompressionStream reads."""
    compressor = zlib.compressobj(6)  # level 9 saves another per cent, slowly
    parts = [compressor.compress(chunk) for chunk in chunks]
    return base64.b64encode(b"".join([*parts, compressor.flush()])).decode()


def plotly_source() -> bytes:
    """plotly.js, from the installed Python package.

    Raises:
        UserError: plotly is not installed.
    """
    # Without importing the Python half, which is slow.
    spec = importlib.util.find_spec("plotly")
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder) / "package_data" / "plotly.min.js"
        if source.is_file():
            return source.read_bytes()
    raise UserError("the package plotly is not installed: pip install 'plotly>=6'")


def script(name: str) -> str:
    """A module of `static/` and everything that it imports, as one script in dependency order.

    A page opened from disk cannot import, so imports and exports are removed: top-level names must
    be unique across modules.
    """
    done: dict[str, str] = {}

    def add(module: str) -> None:
        if module in done:
            return
        text = (STATIC / f"{module}.js").read_text("utf-8")
        for other in _IMPORT.findall(text):
            add(other)
        done[module] = f"// {module}.js\n\n" + _EXPORT.sub("", _IMPORT.sub("", text)).strip()

    add(name)
    return "\n\n" + "\n\n".join(done.values()) + "\n"


def digest(source: str | bytes) -> str:
    """A script's hash as a content security policy names it."""
    source = source.encode() if isinstance(source, str) else source
    return f"'sha256-{base64.b64encode(hashlib.sha256(source).digest()).decode()}'"
