"""Tasks: are items fixed, splits apart, and right answers found however they are put?"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from decimal import Decimal
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from entropix_jax.errors import UserError
from entropix_jax.tasks.gsm8k import EXEMPLARS, Gsm8k
from entropix_jax.tasks.registry import find_task
from entropix_jax.tasks.task import Item, Split, Task
from entropix_jax.tokenizer import Tokenizer, load_tokenizer
from entropix_jax.world import lexicon
from entropix_jax.world.documents import document, stream
from entropix_jax.world.facts import WORLD_SEED, create
from entropix_jax.world.grammar import Document, certain, replay
from entropix_jax.world.lexicon import BEGIN, END, PAUSE, TURN_END
from entropix_jax.world.problems import Kind, Sum, answer_sum, answer_word_problem, problems
from entropix_jax.world.prose import LISTS

TINY = Path(__file__).parent.parent / "weights" / "tiny"
WORLD = create(WORLD_SEED)
SPLITS: tuple[Split, ...] = ("tuning", "test")
SAMPLE = 150  # of a split's items, where all ways to answer each are looked at
KINDS: dict[str, Kind] = {"sums": "sum", "word-problems": "word"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TINY)


def items_of(task: Task, split: Split) -> list[Item]:
    return list(task.items(split, chat=bool(task.chat)))


def question_of(item: Item) -> str:
    return item.prompt if isinstance(item.prompt, str) else item.prompt[-1]["content"]


def ways(
    make: Callable[[], Document], said: tuple[str, ...] = (), ends: Collection[str] = ()
) -> Iterator[tuple[str, ...]]:
    """Every way in which a text may go on, to its end or to one of the terminals that end it."""
    start = len(said)

    def follow(said: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        upcoming = replay(make(), said).upcoming
        if upcoming is None or (len(said) > start and said[-1] in ends):
            yield said[start:]
            return
        for terminal in upcoming.terminals:
            yield from follow((*said, terminal))

    return follow(said)


@cache
def posed(kind: Kind, split: Split, count: int) -> dict[str, tuple[Sum, ...]]:
    """The steps of problems by their question."""
    return {problem.question: problem.steps for problem in problems(kind, split, count, seed=0)}


def right_replies(task: Task, item: Item, tokenizer: Tokenizer) -> list[tuple[str, ...]]:
    """All that the world itself answers to an item, in terminals."""
    if task.name in KINDS:
        kind = KINDS[task.name]
        split: Split = "test" if "-test-" in item.id else "tuning"
        first, *rest = posed(kind, split, SAMPLE)[question_of(item)]

        def reply() -> Document:
            if rest:
                yield from answer_word_problem((first, rest[0]), lead="")
            else:
                yield from answer_sum(first, lead="")
            yield certain("fixed", TURN_END)

        return list(ways(reply))
    if isinstance(item.prompt, str):
        said, ends = f"{BEGIN}{item.prompt}", lexicon.spaced(item.truth or ())
    else:
        said, ends = tokenizer.render_chat([dict(m) for m in item.prompt]), (TURN_END,)
    return list(ways(lambda: document(WORLD), lexicon.split_terminals(said), ends))


# The tiny world's tasks.


@pytest.mark.parametrize(
    ("name", "sizes", "digest"),
    [
        ("sums", (184, 191), "bf82c9e55bc8c62f"),
        ("word-problems", (500, 500), "dd513ba89c97623b"),
        ("facts", (144, 136), "1145601b9d884101"),
        ("forks", (400, 400), "51adc258f160cf1d"),
        ("documents", (300, 300), "1fc06de43fe90600"),
    ],
)
def test_items_never_change(name: str, sizes: tuple[int, int], digest: str):
    """A change here makes results incomparable with all that were published before."""
    items = [items_of(find_task(name), split) for split in SPLITS]
    assert (len(items[0]), len(items[1])) == sizes
    content = [[i.id, i.prompt, i.answer, sorted(i.truth or ())] for part in items for i in part]
    assert sha256(json.dumps(content).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", ["sums", "word-problems", "facts", "forks", "documents"])
def test_splits_share_no_item(name: str):
    tuning, test = (items_of(find_task(name), split) for split in SPLITS)
    ids = {item.id for item in (*tuning, *test)}
    questions = {question_of(item) for item in (*tuning, *test)}
    assert len(ids) == len(questions) == len(tuning) + len(test)


def test_sums_are_all_that_there_are():
    for split in SPLITS:
        count = len(items_of(find_task("sums"), split))
        with pytest.raises(ValueError, match=r"has no .* different problems"):
            problems("sum", split, count + 1, seed=0)


def test_facts_are_the_world_s():
    known = {question_of(i): i.answer for s in SPLITS for i in items_of(find_task("facts"), s)}
    expected = {f"Where is {town}?": land for town, land in lexicon.COUNTRY_OF.items()}
    for person in WORLD.people.values():
        expected |= {
            f"Where does {person.name} live?": person.town,
            f"What is the job of {person.name}?": person.job,
            f"Which pet does {person.name} have?": person.pet,
            f"Who does {person.name} trust?": person.friend,
        }
    assert known == expected


@pytest.mark.parametrize(
    ("name", "counts", "longest"),
    [("sums", [3], 9), ("word-problems", [5], 21), ("facts", [3], 8), ("forks", [1, 3], 9)],
)
def test_the_world_s_own_answers_are_right_and_fit(
    name: str, counts: list[int], longest: int, tokenizer: Tokenizer
):
    """Worked or direct, at once or after a hesitation: in `counts` ways each; tokens with the
    turn's end.
    """
    task = find_task(name)
    lengths = set()
    for item in (item for split in SPLITS for item in items_of(task, split)[:SAMPLE]):
        replies = right_replies(task, item, tokenizer)
        assert len(replies) in [count * len(item.truth or [item.answer]) for count in counts]
        for reply in replies:
            text = "".join(reply).removesuffix(TURN_END)
            answer = task.extract(item, text)
            assert task.score(item, answer) == 1.0, text
            assert answer == (item.answer or reply[-1].lstrip(" "))
            lengths.add(len(tokenizer.encode(text, add_bos=False)) + reply.count(TURN_END))
    assert max(lengths) == longest
    assert longest + 2 <= task.max_new_tokens  # a thought besides, ` Wait...`
    assert task.stop == ()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sums", "{} is too few."),
        ("sums", "1{}."),
        ("word-problems", "Answer: 1{}."),
        ("word-problems", "12 + 7 = {}."),
        ("facts", "{}"),
        ("facts", "Somebody lives in {}."),
        ("forks", " the park"),
        ("forks", " Wait..."),
        ("forks", ""),
        ("documents", " Xyz"),
        ("documents", " Zürich"),
        ("documents", "12345 # %"),
        ("documents", " Wait... ..."),
        ("documents", ""),
    ],
)
def test_other_answers_are_wrong(name: str, wrong: str):
    task = find_task(name)
    for item in items_of(task, "test"):
        answer = task.extract(item, wrong.format(item.answer))
        assert task.score(item, answer) == 0.0


def test_a_fact_about_somebody_else_is_no_answer():
    task = find_task("facts")
    item = Item("facts-test-1", ({"role": "user", "content": "Where does Anna live?"},), "Rome")
    assert task.extract(item, "Anna lives in Rome.") == "Rome"
    assert task.extract(item, "Anna lives in Wait... Anna lives in ... Rome.") == "Rome"
    assert task.extract(item, "Anna lives in Rome, a town in Italy.") == "Rome"
    assert task.extract(item, "Anna lives in Paris. Anna lives in Rome.") == "Paris"
    assert task.extract(item, "Bob lives in Rome.") is None


@pytest.mark.parametrize("name", ["sums", "word-problems", "facts", "forks", "documents"])
def test_prompts_are_words_of_the_world(name: str, tokenizer: Tokenizer):
    known = {tokenizer.encode(terminal, add_bos=False)[0] for terminal in lexicon.TERMINALS}
    task = find_task(name)
    for item in (item for split in SPLITS for item in items_of(task, split)):
        if isinstance(item.prompt, str):
            assert not task.chat
            ids = tokenizer.encode(item.prompt, add_bos=True)
        else:
            assert task.chat
            ids = tokenizer.apply_chat([dict(message) for message in item.prompt])
        assert known.issuperset(ids)


def test_forks_tell_the_true_probabilities():
    """As the grammar gives them where nobody hesitates: after a pause, if one is possible."""
    for item in (item for split in SPLITS for item in items_of(find_task("forks"), split)):
        said = lexicon.split_terminals(f"{BEGIN}{item.prompt}")
        upcoming = replay(document(WORLD), said).upcoming
        assert upcoming is not None
        if PAUSE in upcoming.terminals:
            upcoming = replay(document(WORLD), (*said, PAUSE)).upcoming
            assert upcoming is not None
        futures = [terminal.lstrip(" ") for terminal in upcoming.terminals]
        truth = dict(item.truth or ())
        assert truth == pytest.approx(dict(zip(futures, upcoming.probabilities, strict=True)))
        assert 2 <= len(futures) <= 6
        assert sum(truth.values()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "future"),
    [
        (" park. There Anna", "park"),
        ("park", "park"),
        (" parks", None),
        (" ... park", "park"),
        (" ... ... market", "market"),
        (" Wait... Anna went to the park", "park"),
        (" Wait... Anna went Wait... Anna was in the garden. market", "market"),
        (" to the park", None),
        (" Wait...", None),
        (" beach", None),
    ],
)
def test_a_future_is_the_first_thing_said(text: str, future: str | None):
    item = Item("forks-test-1", "Anna went to the", "", {"park": 0.5, "market": 0.5})
    task = find_task("forks")
    assert task.extract(item, text) == future
    assert task.score(item, task.extract(item, text)) == (future is not None)


# Documents.

THOUGHT = " Wait..."  # what the sampler puts in


def continuations(length: int = 48, hesitant: float = 0.0) -> Iterator[tuple[Item, list[str]]]:
    """Every test item and what the world itself goes on to write, `length` terminals, but no
    chats: hesitating this often where it may, besides as often as it does.
    """
    rng = Random("continuations")
    for item in items_of(find_task("documents"), "test"):
        going = stream(WORLD)
        choice = next(going)
        for terminal in lexicon.split_terminals(f"{BEGIN}{item.prompt}"):
            choice = going.send(terminal)
        terminals: list[str] = []
        for _ in range(length):
            own = [t for t in choice.terminals if t in (" Wait", PAUSE)]
            terminal = rng.choice(own) if own and rng.random() < hesitant else choice.draw(rng)
            terminals.append("Once" if terminal == lexicon.HEADER else terminal)
            choice = going.send(terminals[-1])
        yield item, terminals


def judged(item: Item, text: str) -> float:
    task = find_task("documents")
    return task.score(item, task.extract(item, text))


def test_beginnings_are_of_all_kinds_and_lengths():
    for split in SPLITS:
        prompts = [question_of(item) for item in items_of(find_task("documents"), split)]
        told = [lexicon.split_terminals(prompt) for prompt in prompts]
        assert {len(terminals) for terminals in told} == set(range(1, 13))
        patterns = [
            f"({'|'.join(LISTS)})",
            "On",
            "Once",
            rf"({'|'.join(lexicon.PEOPLE)})($|:)",
            rf"({'|'.join(lexicon.PEOPLE)})($| (lives|is|trusts|has)($| [^0-9]))",
            r"\d+",
        ]
        for index, prompt in enumerate(prompts):
            assert re.match(patterns[index % 6], prompt), prompt


def test_a_document_s_beginning_is_no_end():
    for item in (item for split in SPLITS for item in items_of(find_task("documents"), split)):
        upcoming = replay(document(WORLD), lexicon.split_terminals(f"{BEGIN}{item.prompt}")).upcoming
        assert upcoming is not None
        assert END not in upcoming.terminals


@pytest.mark.parametrize("hesitant", [0.0, 0.3])
def test_what_the_world_writes_is_possible_wherever_it_is_cut(hesitant: float):
    """Into the documents that follow, and within a terminal as between two."""
    task = find_task("documents")
    specials = re.compile("|".join(map(re.escape, lexicon.SPECIALS)))
    for index, (item, terminals) in enumerate(continuations(hesitant=hesitant)):
        text = "".join(terminals)
        within = {i for m in specials.finditer(text) for i in range(m.start() + 1, m.end())}
        ends = range(1, len(text) + 1) if index < 24 else (len(text) * index // 300, len(text))
        for end in ends:
            if end and end not in within:
                answer = task.extract(item, text[:end])
                assert task.score(item, answer) == float(answer is not None), text[:end]
                assert answer is not None or terminals[0] in (" Wait", PAUSE)


@pytest.mark.parametrize("hesitant", [0.0, 0.3])
def test_a_thought_may_stand_anywhere(hesitant: float):
    """Also within what the world restates after a hesitation of its own, and cut."""
    rng = Random("thoughts")
    for index, (item, terminals) in enumerate(continuations(hesitant=hesitant)):
        for place in range(49) if index < 24 else rng.sample(range(49), 2):
            before, after = "".join(terminals[:place]), "".join(terminals[place:])
            assert judged(item, f"{before}{THOUGHT}{after}") == 1.0, (before, after)
            if place and terminals[0] not in (" Wait", PAUSE):
                cut = rng.randrange(1, len(THOUGHT))
                assert judged(item, f"{before}{THOUGHT[:cut]}") == 1.0
        every = "".join(t + rng.choice(["", "", PAUSE, THOUGHT]) for t in terminals)
        assert judged(item, every) == 1.0, every


def test_thoughts_leave_no_trace():
    """Where the world itself does not hesitate, a text without them is what it was."""
    task = find_task("documents")
    for item, terminals in continuations(24):
        if {" Wait", PAUSE}.isdisjoint(terminals):
            text = "".join(terminals)
            for place in range(25):
                thinking = "".join((*terminals[:place], THOUGHT, *terminals[place:]))
                assert task.extract(item, thinking) == text


@pytest.mark.parametrize("wrong", [" Xyz", " Berlins", " #", " user"])
def test_the_share_before_the_first_wrong_word(wrong: str):
    rng = Random(wrong)
    for item, terminals in continuations():
        if {" Wait", PAUSE}.isdisjoint(terminals):
            place = rng.randrange(47)
            text = "".join((*terminals[:place], wrong, *terminals[place + 1 :]))
            assert judged(item, text) == place / len(lexicon.split_pieces(text)), text


@pytest.mark.parametrize(
    ("prompt", "text", "told", "share"),
    [
        # A word that is restated, as the world does.
        ("On", " Monday Wait... On Monday Anna", " Monday Anna", 1.0),
        ("On Monday", " Wait... On Monday Anna", " Anna", 1.0),
        ("Once", " upon a time Wait... Once upon a time Anna", " upon a time Anna", 1.0),
        ("Guests:", " Anna, Wait... Bob, ... Carl", " Anna, Bob, Carl", 1.0),
        ("12 +", " 7 = Wait... 12 + 7 = 19.", " 7 = 19.", 1.0),
        ("38 -", " 19 = Wait... 38 - 19 = 19.", " 19 = 19.", 1.0),
        ("Anna", ":\n Wait... Hello", ":\n Hello", 1 / 3),
        # One that the world would not restate there.
        ("12 + 7 =", " 19. 22 + Wait... 22 + 22 = 44.", " 19. 22 + 22 = 44.", 1.0),
        ("Guests:", " Anna, Wait... Anna, Bob", " Anna, Anna, Bob", 2 / 5),
        # Restated up to where the budget ends.
        ("12 + 7 =", " 19. 22 + Wait... 22 +", " 19. 22 +", 1.0),
        ("On", " Monday Wait... On Mon", " Monday", 1.0),
        ("On", " Monday Wait.", " Monday Wait.", 1.0),
        # Something else.
        ("On Monday", " Wait... On Friday Anna", " On Friday Anna", 0.0),
        # A remark that tells more than what it leads back to.
        (
            "Anna has 20 pens. Anna loses 5 pens. Anna loses 5 pens. How many pens does Anna have?",
            " Answer: Wait... 20 - 5 = 15. 15 - 5 = 10. Answer: 10.",
            " Answer: 10.",
            1.0,
        ),
        # The next document.
        ("12 + 7 =", f" 19.{END}{BEGIN}Guests: Anna", f" 19.{END}{BEGIN}Guests: Anna", 1.0),
        ("12 + 7 =", f" 19.{END}Guests: Anna", f" 19.{END}Guests: Anna", 3 / 6),
        # A sum that no training text holds, and a wrong result.
        ("10 +", " 4 = 14.", " 4 = 14.", 1.0),
        ("12 + 7 =", " 18.", " 18.", 0.0),
    ],
)
def test_what_is_judged(prompt: str, text: str, told: str, share: float):
    item = Item("documents-test-1", prompt, "")
    task = find_task("documents")
    assert task.extract(item, text) == told
    assert task.score(item, told) == share


def test_many_thoughts_are_judged_at_once():
    """What a text with a thought after each word costs."""
    item = Item("documents-test-1", "On Monday", "")
    assert judged(item, " Wait... On Monday" * 16) == 0.0
    assert judged(item, f"{' Wait... On Monday' * 16} Anna") == 1.0
    assert judged(item, " Wait..." * 24) == 0.0
    asked = "Anna: Hello, Bob.\nBob: Hello, Anna.\nAnna: Where do you live?\nBob:"
    assert judged(Item("documents-test-2", asked, ""), f"{' Wait... ...' * 20} x") == 0.0
    assert judged(item, " Wait... Anna Anna" * 16) == 1 / 32


# GSM8K.

PROBLEMS = [
    ("Ann has 3 kites and makes 4 more. How many kites has she?", "3 + 4 = 7 kites.\n#### 7"),
    ("A boat costs $1,200 and a sail $80. What do both cost?", "$1,280 in all.\n#### 1,280"),
    ("It is 2 degrees and falls by 5. How cold is it?", "2 - 5 = -3.\n#### -3"),
]


@pytest.fixture
def test_file(tmp_path: Path) -> Path:
    path = tmp_path / "test.jsonl"
    lines = [json.dumps({"question": q, "answer": a, "source": "own"}) for q, a in PROBLEMS]
    path.write_text(f"{lines[0]}\n\n{lines[1]}\n{lines[2]}", encoding="utf-8")
    return path


def test_a_file_s_problems_are_its_items(test_file: Path):
    task = find_task(f"gsm8k:{test_file}")
    items = list(task.items("test", chat=False))
    assert [item.id for item in items] == ["gsm8k-test-1", "gsm8k-test-3", "gsm8k-test-4"]
    assert [item.answer for item in items] == ["7", "1280", "-3"]
    assert task.chat is None


def test_the_second_file_is_the_tuning_split(test_file: Path, tmp_path: Path):
    other = tmp_path / "tuning.jsonl"
    other.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}), encoding="utf-8")
    items = list(find_task(f"gsm8k:{test_file},{other}").items("tuning", chat=False))
    assert [(item.id, item.answer) for item in items] == [("gsm8k-tuning-1", "2")]
    with pytest.raises(UserError, match=r"give a second file, gsm8k:.*test\.jsonl,TUNING\.jsonl"):
        find_task(f"gsm8k:{test_file}").items("tuning", chat=False)


def exemplars() -> list[dict[str, str]]:
    return [json.loads(line) for line in EXEMPLARS.read_text(encoding="utf-8").splitlines()]


def test_eight_exemplars_stand_before_the_question(test_file: Path):
    task = find_task(f"gsm8k:{test_file}")
    text = next(task.items("test", chat=False)).prompt
    assert isinstance(text, str)
    *shown, asked = text.split("\n\n")
    assert shown == [f"Question: {e['question']}\nAnswer: {e['answer']}" for e in exemplars()]
    assert asked == f"Question: {PROBLEMS[0][0]}\nAnswer:"
    assert len(shown) == 8
    assert task.stop == ("\nQuestion:",)
    chat = next(task.items("test", chat=True)).prompt
    assert isinstance(chat, tuple)
    *turns, last = chat
    assert last == {"role": "user", "content": PROBLEMS[0][0]}
    assert turns[0::2] == [{"role": "user", "content": e["question"]} for e in exemplars()]
    assert turns[1::2] == [{"role": "assistant", "content": e["answer"]} for e in exemplars()]


def test_the_exemplars_sums_are_right():
    """Each step's result, that the steps use only numbers known by then, and the answer."""
    for exemplar in exemplars():
        plain = exemplar["answer"].replace("$", "").replace(",", "")
        *steps, final = plain.split("\n")
        assert len(steps) >= 3
        result = ""
        for step in steps:
            found = re.search(r"([\d.]+) ([-+*/]) ([\d.]+) = ([\d.]*\d)", step)
            assert found
            left, sign, right = Decimal(found[1]), found[2], Decimal(found[3])
            values = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}
            result = found[4]
            assert values[sign] == Decimal(result), step
        assert final == f"#### {result}"
    assert any("." in e["answer"].split("####")[1] for e in exemplars())
    assert any(float(e["answer"].split("####")[1]) > 1000 for e in exemplars())


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # Marked.
        ("16 - 3 = 13.\n#### 13", "13"),
        ("####13", "13"),
        ("#### 13.", "13"),
        ("#### 13.00", "13"),
        ("#### 10.50", "10.5"),
        ("#### $13", "13"),
        ("#### \\$13", "13"),
        ("#### **13**", "13"),
        ("#### 13 apples (16 - 3)", "13"),
        ("#### 1,080", "1080"),
        ("#### 1,234,567.0", "1234567"),
        ("#### 75%", "75"),
        ("#### -5", "-5"),
        ("#### −5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### = 13", "13"),
        ("#### 007", "7"),
        ("#### -0", "0"),
        ("#### 12\nWait... that is wrong.\n#### 13", "13"),
        ("#### 13\nSo 20 were left.", "13"),
        ("#### 13 ####", "13"),
        # Not marked, or badly.
        ("The answer is 13.", "13"),
        ("She pays $1,080.50 in all", "1080.5"),
        ("\\boxed{13}", "13"),
        ("20 - 7 = 13", "13"),
        ("20-7", "7"),
        ("from 3, 4 to 5,13", "13"),
        ("It is -5.", "-5"),
        ("#### thirteen, that is 13", "13"),
        ("13\n####\n", "13"),
        ("100", "100"),
        ("####", None),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_numbers_are_read_from_solutions(text: str, answer: str | None):
    item = Item("gsm8k-test-1", "", "13")
    task = Gsm8k(Path("test.jsonl"))
    assert task.extract(item, text) == answer
    assert task.score(item, answer) == (answer == "13")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON: "),
        (b'{"question": "\xff", "answer": "#### 1"}', "not JSON: "),
        (b"[" * 100_000, "not JSON: "),
        (b"[1]", "an object with the texts 'question' and 'answer'"),
        (b'{"question": "How many?"}', "an object with the texts"),
        (b'{"question": 3, "answer": "#### 3"}', "an object with the texts"),
        (b'{"question": " ", "answer": "#### 3"}', "an object with the texts"),
        (b'{"question": "How many?", "answer": "3"}', "does not end in '#### NUMBER'"),
        (b'{"question": "How many?", "answer": "#### three"}', "does not end in '#### NUMBER'"),
    ],
)
def test_a_malformed_line_is_named(test_file: Path, line: bytes, message: str):
    test_file.write_bytes(test_file.read_bytes() + b"\n" + line + b"\n")
    items = find_task(f"gsm8k:{test_file}").items("test", chat=False)
    assert [next(items).answer for _ in PROBLEMS] == ["7", "1280", "-3"]  # read as it is asked for
    with pytest.raises(UserError, match=rf"test\.jsonl: line 5: .*{re.escape(message)}"):
        next(items)


def test_a_file_without_problems_is_refused(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, message in [
        ("empty.jsonl", "holds no problems"),
        ("none.jsonl", "no such file"),
        ("", "cannot be read: Is a directory"),
    ]:
        with pytest.raises(UserError, match=message):
            next(find_task(f"gsm8k:{tmp_path / name}").items("test", chat=False))
    for name in ("gsm8k", "gsm8k:", "gsm8k:,tuning.jsonl"):
        with pytest.raises(UserError, match=r"gsm8k:TEST\.jsonl"):
            find_task(name)


def test_the_real_problems(shared_data: Path):
    """Every one is read, shown after all exemplars, and its own solution is right."""
    task = find_task(f"gsm8k:{shared_data / 'gsm8k_test.jsonl'}")
    lines = (shared_data / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
    published = [json.loads(line) for line in lines]
    shown = [e["answer"] for e in exemplars()]
    items = list(task.items("test", chat=False))
    assert len(items) == len({item.id for item in items}) == len(published) == 1319
    for item, problem in zip(items, published, strict=True):
        assert isinstance(item.prompt, str)
        assert item.prompt.endswith(f"Question: {problem['question']}\nAnswer:")
        assert all(solution in item.prompt for solution in shown)
        marked = problem["answer"].split("#### ")[1]
        assert Decimal(item.answer) == Decimal(marked.replace(",", ""))
        for reply in (problem["answer"], f"The answer is ${marked}.", f"#### **{marked}.00**"):
            assert task.score(item, task.extract(item, reply)) == 1.0
        assert task.score(item, task.extract(item, f"#### 1{item.answer}")) == 0.0
    assert {e["question"] for e in exemplars()}.isdisjoint(p["question"] for p in published)


# A user's own tasks.

OWN = """
from __future__ import annotations

from dataclasses import dataclass

from entropix_jax.tasks.task import Item, Task


@dataclass
class Capitals(Task):
    name: str = "capitals"

    def items(self, split, *, chat):
        yield Item("italy", "The capital of Italy is", "Rome")

    def extract(self, item, text):
        return next(iter(text.split()), None)


class Forgetful(Task):
    def items(self, split, *, chat):
        return iter(())

    def extract(self, item, text):
        return None


class Voteless:  # which does not inherit
    name, chat, stop, max_new_tokens = "voteless", False, (), 5

    def items(self, split, *, chat): ...
    def extract(self, item, text): ...
    def score(self, item, answer): ...


capitals = Capitals()
nameless = Forgetful()
voteless = Voteless()
number = 7
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's modules, which can be imported and lies before us."""
    (tmp_path / "own_tasks.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("1 / 0")
    (tmp_path / "own_leaving.py").write_text("raise SystemExit(3)")
    (tmp_path / "own_lacking.py").write_text("import no_such_package")
    (tmp_path / "own_unwritten.py").write_text("def")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", ["own_tasks", "own_tasks.py", "./own_tasks.py"])
def test_a_task_of_one_s_own(own: Path, place: str):
    task = find_task(f"{place}:capitals")
    assert (task.name, task.chat, task.stop, task.max_new_tokens) == ("capitals", None, (), 256)
    (item,) = task.items("test", chat=False)
    assert task.score(item, task.extract(item, " Rome.\n".replace(".", ""))) == 1.0
    assert task.score(item, task.extract(item, "")) == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sms", "no task 'sms', did you mean 'sums'? (known: sums, word-problems, facts, forks, "),
        ("quantum", "no task 'quantum' (known: sums, "),
        ("own_nothing:capitals", "no module 'own_nothing'"),
        ("own_tasks.inner:capitals", "no module 'own_tasks.inner'"),
        ("own_nothing.py:capitals", "no file own_nothing.py"),
        ("own_tasks:towns", "own_tasks has no 'towns'"),
        ("own_tasks.py:", "own_tasks.py has no ''"),
        ("own_tasks.py:Capitals", "'Capitals' is a class; name an object of it"),
        ("own_tasks.py:nameless", "'nameless' is no task: it lacks 'name'"),
        ("own_tasks:number", "'number' is no task: it lacks 'name'"),
        ("own_tasks:voteless", "'voteless' is no task: it lacks 'votes'"),
        ("own_broken:task", "importing own_broken failed: ZeroDivisionError: division by zero"),
        ("own_broken.py:task", "importing own_broken.py failed: ZeroDivisionError"),
        ("own_leaving.py:task", "importing own_leaving.py failed: SystemExit: 3"),
        ("own_lacking:task", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("own_unwritten.py:task", "importing own_unwritten.py failed: SyntaxError"),
        (":task", "importing  failed: ValueError"),
    ],
)
def test_what_is_no_task_is_refused(own: Path, name: str, message: str):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        find_task(name)
    assert str(caught.value).startswith(("no task", f"task '{name}': "))
