"""The page of a batch: the records that it wrote, to sort, filter and open."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entropix_jax.batches.output import parse_sidecar
from entropix_jax.batches.storage import local_path
from entropix_jax.errors import UserError
from entropix_jax.files import read_bytes
from entropix_jax.report.embedding import packed
from entropix_jax.report.page import ended, render
from entropix_jax.report.shapes import Each, JsonLines, Maybe, check_regimes, check_shape

MOST_BYTES = 8_000_000  # of a page that opens at once everywhere
OWN_SAMPLER = "the run's own"
_SIDECAR = {"identity": {"sampler?": dict}, "samplers?": Each(str)}
_ANY = {"id": Maybe(str), "line": int, "digest": str, "finish_reason?": Maybe(str)}
_FAILED = _ANY | {"error": str}
_RESULT = _ANY | {
    "text": str,
    **dict.fromkeys(("tokens", "forwards", "retracted"), int),
    **dict.fromkeys(("regimes", "actions"), Each(int)),
    "timings": Each(float),
    **dict.fromkeys(("error?", "sampler_digest?"), Maybe(str)),
    "token_ids?": list,
    **dict.fromkeys(("mean_entropy?", "mean_varentropy?"), float),
}


def batch_page(output: Path) -> str:
    """The page of a batch's output.

    Token ids are left out where the page would be larger than `MOST_BYTES` with them; should it be
    larger even so, a note on standard error says so.

    Raises:
        UserError: the file is damaged, or its last whole line is not a result.
    """
    reader = RecordReader(output)
    facts = reader.facts()
    records = list(reader.records())
    facts |= {"torn": reader.torn, "records": len(records), "prompts": 0}
    if not records:
        raise UserError(f"{output}: line 1: cut off: no result is left")
    prompts, samplers = reader.asked(records)
    for record in records:
        asked = prompts.get((record["line"], record["digest"]), {})
        if "prompt" in asked:
            facts["prompts"] += 1
        digest = record.get("sampler_digest")
        named = samplers.get(digest, digest) if digest else OWN_SAMPLER
        record |= {"sampler": named} | asked
        record["ended"] = ended(record.get("finish_reason"))
    for without in ((), ("token_ids",)):
        facts["without"] = list(without)
        payload = packed(_lines(records, without))
        facts["bytes"] = len(payload)
        page = render("batch", {"facts": facts}, {"results": payload})
        if len(page) <= MOST_BYTES:
            return page
    each = len(payload) / len(records)
    print(
        f"note: the page has {len(page) / 1e6:.0f} MB: {len(records)} records of {each:.0f} bytes",
        file=sys.stderr,
    )
    return page


def _lines(records: list[dict[str, Any]], without: tuple[str, ...]) -> Iterator[bytes]:
    for record in records:
        kept = {k: v for k, v in record.items() if k not in without}
        yield json.dumps(kept).encode() + b"\n"


@dataclass
class RecordReader(JsonLines):
    """Reads what a batch wrote."""

    _sidecar: Mapping[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """What the page says of the run, as far as the file beside the output says it.

        Raises:
            UserError: that file is not the description of a run.
        """
        path = self.path.with_name(f"{self.path.name}.run.json")
        if path.is_file():
            self._sidecar = parse_sidecar(read_bytes(path), str(path))
            check_shape(self._sidecar, _SIDECAR, str(path))
        identity = self._sidecar.get("identity", {})
        names = ("model", "input", "seed", "max_new_tokens", "context", "version")
        return {
            "name": self.path.name,
            "known": bool(identity),
            **{name: identity.get(name) for name in names},
            "mixed": len(self._sidecar.get("earlier", [])) > 0,
            "parameters": identity.get("sampler", {}),
        }

    def records(self) -> Iterator[dict[str, Any]]:
        """The results, in the order in which they were written.

        Raises:
            UserError: the file cannot be read, or a line is not the result of a record: one line
                that names it.
        """
        for line in self:
            self._take(line.record)
            yield line.record

    def asked(
        self, records: list[dict[str, Any]]
    ) -> tuple[dict[tuple[int, str], dict[str, Any]], dict[str, str]]:
        """What was asked, by line and digest, and samplers by their own digests.

        The input is read where it is still there. A record of it is taken only where it is written
        as it was when it was run.
        """
        samplers = {digest: name for name, digest in self._sidecar.get("samplers", {}).items()}
        address = self._sidecar.get("identity", {}).get("input")
        path = self._input(address) if isinstance(address, str) else None
        if path is None:
            return {}, samplers
        from entropix_jax.batches.records import Record, read_records

        wanted = {(record["line"], record["digest"]) for record in records}
        found: dict[tuple[int, str], dict[str, Any]] = {}
        try:
            for given in read_records(str(path)):
                key = given.line, given.digest
                if isinstance(given, Record) and key in wanted:
                    found[key] = {
                        "prompt": given.prompt or _conversation(given.messages or ()),
                        **({} if given.sampler is None else {"sampler": given.sampler}),
                        **({} if given.seed is None else {"seed": given.seed}),
                    }
        except UserError:  # a page without prompts is better than none
            return {}, samplers
        return found, samplers

    def _input(self, address: str) -> Path | None:
        """The file that was read, as it was called or beside the output."""
        beside = str(self.path.parent / Path(address).name)
        for name in (address, beside):
            try:
                path = local_path(name)
                if path is not None and path.is_file() and not path.samefile(self.path):
                    return path
            except (OSError, ValueError, UserError):
                continue
        return None

    def _take(self, record: dict[str, Any]) -> None:
        if not {"id", "line", "digest"} <= record.keys():
            self._refuse("not the result of a record: no 'id', 'line' and 'digest'")
        if "setting" in record and "phase" in record:
            self._refuse(f"a row of a study: give its folder, {self.path.parent}")
        self._check(record, _RESULT if "text" in record else _FAILED)
        check_regimes(record.get("regimes", ()), self._where)


def _conversation(messages: tuple[dict[str, Any], ...]) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
