"""The page of a batch: the records that it wrote, to sort, filter and open."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from entropix_jax.batches.identity import parse_sidecar
from entropix_jax.errors import UserError
from entropix_jax.files import read_bytes
from entropix_jax.report.embedding import packed
from entropix_jax.report.page import ended, render
from entropix_jax.report.reading import KINDS, LONGEST_LINE, NUMBER, REGIMES, is_kind

MOST_BYTES = 8_000_000  # of a page that opens at once everywhere
OWN_SAMPLER = "the run's own"
_RESULT: Mapping[str, type] = {
    "text": str,
    "tokens": int,
    "forwards": int,
    "retracted": int,
    "regimes": dict,
    "actions": dict,
    "timings": dict,
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


class RecordReader:
    """Reads what a batch wrote. `torn` says that its last line was cut off."""

    def __init__(self, path: Path) -> None:
        self.torn = False
        self._path = path
        self._number = 0
        self._sidecar: Mapping[str, Any] = {}

    def facts(self) -> dict[str, Any]:
        """What the page says of the run, as far as the file beside the output says it.

        Raises:
            UserError: that file is not the description of a run.
        """
        path = self._path.with_name(f"{self._path.name}.run.json")
        if path.is_file():
            self._sidecar = parse_sidecar(read_bytes(path), str(path))
        identity = self._sidecar.get("identity", {})
        for place, value, kind in (
            ("identity.sampler", identity.get("sampler", {}), dict),
            *((f"samplers.{k}", v, str) for k, v in self._sidecar.get("samplers", {}).items()),
        ):
            if not is_kind(value, kind):
                raise UserError(f"{path}: {place} is not {KINDS[kind]}")
        names = ("model", "input", "seed", "max_new_tokens", "context", "version")
        return {
            "name": self._path.name,
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
        try:
            with self._path.open("rb") as file:
                while raw := file.readline(LONGEST_LINE):
                    self._number += 1
                    record = self._parse(raw)
                    if record is None:
                        self.torn = True
                        return
                    self._check(record)
                    yield record
        except OSError as error:
            raise UserError(f"{self._path}: cannot be read: {error.strerror}") from None

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
        from entropix_jax.batches.source import Record, read_records

        wanted = {(record["line"], record["digest"]) for record in records}
        found: dict[tuple[int, str], dict[str, Any]] = {}
        try:
            for given in read_records(str(path)):
                key = given.line, f"{given.digest:015x}"
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
        for path in (Path(address), self._path.parent / Path(address).name):
            try:
                if path.is_file() and not path.samefile(self._path):
                    return path
            except (OSError, ValueError):
                continue
        return None

    def _parse(self, raw: bytes) -> dict[str, Any] | None:
        """A line's object; None of a last line that was cut off."""
        try:
            record = json.loads(raw.decode(), parse_constant=self._no_number)
        except (ValueError, RecursionError) as error:
            if not raw.endswith(b"\n") and len(raw) < LONGEST_LINE:
                return None
            self._refuse(f"not {'UTF-8' if isinstance(error, UnicodeDecodeError) else 'JSON'}")
        if not isinstance(record, dict):
            self._refuse("not a JSON object")
        return record

    def _check(self, record: dict[str, Any]) -> None:
        if not {"id", "line", "digest"} <= record.keys():
            self._refuse("not the result of a record: no 'id', 'line' and 'digest'")
        if "setting" in record and "phase" in record:
            self._refuse(f"a row of a study: give its folder, {self._path.parent}")
        if record["id"] is not None:
            self._check_field(record, "id", str)
        self._check_field(record, "line", int)
        self._check_field(record, "digest", str)
        if record.get("finish_reason") is not None:
            self._check_field(record, "finish_reason", str)
        if "text" not in record:
            self._check_field(record, "error", str)
            return
        for name, kind in _RESULT.items():
            self._check_field(record, name, kind)
        if unknown := sorted(record["regimes"].keys() - set(REGIMES)):
            self._refuse(f"no regime {json.dumps(unknown[0])}")
        for name in ("regimes", "actions", "timings"):
            for key in record[name]:
                self._check_field(record[name], key, NUMBER if name == "timings" else int)
        for name in ("error", "sampler_digest"):
            if record.get(name) is not None:
                self._check_field(record, name, str)
        if "token_ids" in record:
            self._check_field(record, "token_ids", list)
        for name in ("mean_entropy", "mean_varentropy"):
            if name in record:
                self._check_field(record, name, NUMBER)

    def _check_field(self, record: Mapping[str, Any], name: str, kind: Any) -> None:
        if name not in record:
            self._refuse(f"a result without '{name}'")
        if not is_kind(record[name], kind):
            self._refuse(f"'{name}' is not {KINDS.get(kind, 'a number')}")

    def _no_number(self, name: str) -> NoReturn:
        self._refuse(f"{name} is no number of a result")

    def _refuse(self, problem: str) -> NoReturn:
        raise UserError(f"{self._path}: line {self._number}: {problem}")


def _conversation(messages: tuple[dict[str, Any], ...]) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
