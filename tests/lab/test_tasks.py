"""Tasks: fixed items, disjoint splits, and extraction of answers."""

import json
import re
from collections.abc import Callable, Collection, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from entropix_jax.errors import UserError
from entropix_jax.lab.tasks.published import EXEMPLARS, Gsm8k
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.lab.tasks.task import Item, Split, Task
from entropix_jax.lab.world import lexicon
from entropix_jax.lab.world.documents import document, stream
from entropix_jax.lab.world.facts import WORLD_SEED, create
from entropix_jax.lab.world.grammar import Document, certain, replay
from entropix_jax.lab.world.lexicon import BEGIN, END, PAUSE, TURN_END
from entropix_jax.lab.world.problems import Kind, Sum, answer_sum, answer_word_problem, problems
from entropix_jax.text.tokenizer import Tokenizer, load_tokenizer

TINY = Path(__file__).parents[2] / "weights" / "tiny"
WORLD = create(WORLD_SEED)
SPLITS: tuple[Split, ...] = ("tuning", "test")
SAMPLE = 150  # items of a split whose possible answers are all checked
KINDS: dict[str, Kind] = {"sums": "sum", "word-problems": "word"}


def items_of(task: Task, split: Split) -> list[Item]:
    return list(task.items(split, chat=bool(task.chat)))


def question_of(item: Item) -> str:
    return item.prompt if isinstance(item.prompt, str) else item.prompt[-1]["content"]


def all_continuations(
    make: Callable[[], Document], said: tuple[str, ...] = (), ends: Collection[str] = ()
) -> Iterator[tuple[str, ...]]:
    """Yields all continuations of a text, up to its end or one of the terminals `ends`."""
    start = len(said)

    def follow(said: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        upcoming = replay(make(), said)
        if upcoming is None or (len(said) > start and said[-1] in ends):
            yield said[start:]
            return
        for terminal in upcoming.terminals:
            yield from follow((*said, terminal))

    return follow(said)


@cache
def posed(kind: Kind, split: Split) -> dict[str, tuple[Sum, ...]]:
    """Returns the steps of problems by their question."""
    return {problem.question: problem.steps for problem in problems(kind, split, SAMPLE, seed=0)}


def right_replies(task: Task, item: Item, tokenizer: Tokenizer) -> list[tuple[str, ...]]:
    """Returns all of the world's own answers to an item, in terminals."""
    if task.name in KINDS:
        split: Split = "test" if "-test-" in item.id else "tuning"
        first, *rest = posed(KINDS[task.name], split)[question_of(item)]

        def reply() -> Document:
            if rest:
                yield from answer_word_problem((first, rest[0]), lead="")
            else:
                yield from answer_sum(first, lead="")
            yield certain("fixed", TURN_END)

        return list(all_continuations(reply))
    if isinstance(item.prompt, str):
        said, ends = f"{BEGIN}{item.prompt}", lexicon.spaced(item.truth or ())
    else:
        said, ends = tokenizer.render_chat([dict(m) for m in item.prompt]), (TURN_END,)
    return list(all_continuations(lambda: document(WORLD), lexicon.split_terminals(said), ends))


# The tiny world's tasks.


@pytest.mark.parametrize(
    ("name", "sizes", "digest"),
    [
        ("sums", (184, 191), "bf82c9e55bc8c62f"),
        ("word-problems", (500, 500), "dd513ba89c97623b"),
        ("facts", (144, 136), "1145601b9d884101"),
        ("forks", (400, 400), "51adc258f160cf1d"),
        ("documents", (300, 300), "1fc06de43fe90600"),
        ("asking-facts", (99, 93), "32d3508125d5db43"),
        ("asking-ambiguous", (200, 200), "86a35e23f07e6e96"),
    ],
)
def test_items_never_change(name: str, sizes: tuple[int, int], digest: str):
    """A change makes results incomparable with published ones. Splits share no item."""
    items = [items_of(find_task(name), split) for split in SPLITS]
    assert (len(items[0]), len(items[1])) == sizes
    content = [[i.id, i.prompt, i.answer, sorted(i.truth or ())] for part in items for i in part]
    assert sha256(json.dumps(content).encode()).hexdigest()[:16] == digest
    ids = {item.id for part in items for item in part}
    questions = {question_of(item) for part in items for item in part}
    assert len(ids) == len(questions) == sum(sizes)


@pytest.mark.parametrize(
    ("name", "counts", "longest"),
    [("sums", [3], 9), ("word-problems", [5], 21), ("facts", [3], 8), ("forks", [1, 3], 9)],
)
def test_the_worlds_own_answers_score_1_and_fit(name: str, counts: list[int], longest: int):
    """An answer has `counts` forms. `longest` is the number of tokens of the longest one."""
    task, tokenizer = find_task(name), load_tokenizer(TINY)
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
    assert longest + 2 <= task.max_new_tokens  # plus a thought, ` Wait...`
    assert task.stop == ()


WRONG = {
    "sums": ["{} is too few.", "1{}."],
    "word-problems": ["Answer: 1{}.", "12 + 7 = {}."],
    "facts": ["{}", "Somebody lives in {}.", "Anna lives in Berlin. Bob lives in {}."],
    "forks": [" the park", " Wait...", ""],
    "documents": [" Xyz", " Wait... ...", ""],
}


@pytest.mark.parametrize(("name", "wrong"), WRONG.items())
def test_other_answers_are_wrong(name: str, wrong: list[str]):
    task = find_task(name)
    for item in items_of(task, "test"):
        for text in wrong:
            answer = task.extract(item, text.format(item.answer))
            assert task.score(item, answer) == 0.0, text


def test_forks_have_the_true_probabilities():
    """The probabilities of the grammar exclude hesitations, so they follow a pause if possible."""
    for item in (item for split in SPLITS for item in items_of(find_task("forks"), split)):
        said = lexicon.split_terminals(f"{BEGIN}{item.prompt}")
        upcoming = replay(document(WORLD), said)
        assert upcoming is not None
        if PAUSE in upcoming.terminals:
            upcoming = replay(document(WORLD), (*said, PAUSE))
            assert upcoming is not None
        futures = [terminal.lstrip(" ") for terminal in upcoming.terminals]
        truth = dict(item.truth or ())
        assert truth == pytest.approx(dict(zip(futures, upcoming.probabilities, strict=True)))
        assert 2 <= len(futures) <= 6
        assert sum(truth.values()) == pytest.approx(1.0, abs=1e-12)


# Documents.

THOUGHT = " Wait..."  # an injected thought


def continuations(length: int = 48, hesitant: float = 0.0) -> Iterator[tuple[Item, list[str]]]:
    """Yields every test item with a continuation of `length` terminals sampled from the world,
    without chats. `hesitant` is the probability of an extra hesitation where one is possible.
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


@pytest.mark.parametrize("hesitant", [0.0, 0.3])
def test_the_worlds_own_text_is_possible(hesitant: float):
    """Texts may be cut anywhere, also within a terminal, and contain the next documents. A thought
    may be anywhere in it, also within a restatement after a hesitation, and may be cut."""
    task, rng = find_task("documents"), Random("thoughts")
    specials = re.compile("|".join(map(re.escape, lexicon.SPECIALS)))
    for index, (item, terminals) in enumerate(continuations(hesitant=hesitant)):
        text, hesitates = "".join(terminals), terminals[0] in (" Wait", PAUSE)
        within = {i for m in specials.finditer(text) for i in range(m.start() + 1, m.end())}
        ends = range(1, len(text) + 1) if index < 8 else (len(text) * index // 300,)
        for end in {*ends} - {0} - within:
            answer = task.extract(item, text[:end])
            assert task.score(item, answer) == float(answer is not None), text[:end]
            assert answer is not None or hesitates
        for place in range(49) if index < 8 else rng.sample(range(49), 1):
            before, after = "".join(terminals[:place]), "".join(terminals[place:])
            assert judged(item, f"{before}{THOUGHT}{after}") == 1.0, (before, after)
            if place and not hesitates:
                assert judged(item, before + THOUGHT[: rng.randrange(1, len(THOUGHT))]) == 1.0
        every = "".join(t + rng.choice(["", "", PAUSE, THOUGHT]) for t in terminals)
        assert judged(item, every) == 1.0, every


@pytest.mark.parametrize(
    ("prompt", "text", "told", "share"),
    [
        # A restated word, as in the world's text.
        ("On", " Monday Wait... On Monday Anna", " Monday Anna", 1.0),
        ("Anna", ":\n Wait... Hello", ":\n Hello", 1 / 3),
        # A restatement that the world does not have.
        ("12 + 7 =", " 19. 22 + Wait... 22 + 22 = 44.", " 19. 22 + 22 = 44.", 1.0),
        ("Guests:", " Anna, Wait... Anna, Bob", " Anna, Anna, Bob", 2 / 5),
        # Restated up to where the budget ends.
        ("12 + 7 =", " 19. 22 + Wait... 22 +", " 19. 22 +", 1.0),
        ("On", " Monday Wait... On Mon", " Monday", 1.0),
        # Another word.
        ("On Monday", " Wait... On Friday Anna", " On Friday Anna", 0.0),
        # A thought followed by more than the restatement.
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
    ],
)
def test_judging(prompt: str, text: str, told: str, share: float):
    item = Item("documents-test-1", prompt, "")
    task = find_task("documents")
    assert task.extract(item, text) == told
    assert task.score(item, told) == share


def test_many_thoughts_are_judged_fast():
    item = Item("documents-test-1", "On Monday", "")
    assert judged(item, " Wait... On Monday" * 16) == 0.0
    assert judged(item, f"{' Wait... On Monday' * 16} Anna") == 1.0
    assert judged(item, " Wait... Anna Anna" * 16) == 1 / 32


# GSM8K.

PROBLEMS = [
    ("Ann has 3 kites and makes 4 more. How many kites has she?", "3 + 4 = 7 kites.\n#### 7"),
    ("A boat costs $1,200 and a sail $80. What do both cost?", "$1,280 in all.\n#### 1,280"),
    ("It is 2 degrees and falls by 5. How cold is it?", "2 - 5 = -3.\n#### -3"),
]


ROLES = (("user", "question"), ("assistant", "answer"))


def test_items_of_a_gsm8k_file(tmp_path: Path):
    lines = [json.dumps({"question": q, "answer": a, "source": "own"}) for q, a in PROBLEMS]
    (tmp_path / "test.jsonl").write_text(f"{lines[0]}\n\n{lines[1]}\n{lines[2]}")
    task = find_task(f"gsm8k:{tmp_path}/test.jsonl")
    assert not list(task.items("tuning", chat=False))  # a quarter of three problems is zero
    items, chats = (
        {item.id: item for item in task.items("test", chat=chat)} for chat in (False, True)
    )
    answers = {name: item.answer for name, item in items.items()}
    assert answers == {"gsm8k-1": "7", "gsm8k-3": "1280", "gsm8k-4": "-3"}
    # Eight solved problems precede the question.
    text, chat = items["gsm8k-1"].prompt, chats["gsm8k-1"].prompt
    assert isinstance(text, str)
    solved = [json.loads(line) for line in EXEMPLARS.read_text(encoding="utf-8").splitlines()]
    *shown, asked = text.split("\n\n")
    assert shown == [f"Question: {e['question']}\nAnswer: {e['answer']}" for e in solved]
    assert asked == f"Question: {PROBLEMS[0][0]}\nAnswer:"
    assert (len(shown), task.stop, task.chat) == (8, ("\nQuestion:",), None)
    turns = [(role, e[key]) for e in solved for role, key in ROLES]
    turns.append(("user", PROBLEMS[0][0]))
    assert chat == tuple({"role": role, "content": said} for role, said in turns)


SOLUTIONS: dict[str | None, list[str]] = {
    "13": [
        *("16 - 3 = 13.\n#### 13", "#### 13.00", "#### $13", "#### **13**", "#### 13 ####"),
        *("#### 13 apples (16 - 3)", "#### 12\nWait... that is wrong.\n#### 13"),
        *("#### 13\nSo 20 were left.", "#### thirteen, that is 13", "The answer is 13."),
        *("\\boxed{13}", "So \\(\\boxed{13}\\) boats cover 40% of 200 guests.", "x = 13"),
        *("#### 8 + 5 = 13 apples", "#### $8 + $5 = $13", "#### 13 (since 8 + 5 = 13 and 5 < 8)"),
        *("#### 13 = 8 + 5", "#### 20 kg - 7 kg = 13 kg", "#### 4 * 2 + 5 = 8 + 5 = 13"),
        *("The answer is: **13**", "It drives 13 km/h", "That is 13%.", "13 apples", "13m in all"),
        *("16 - 3 = 13 hours for 6 doors.", "It is 2 = 13 of 20, or 13", "= 7 + 6, that is 13"),
        *("He has 7 + 6 = 13 in 2 years!\n\nDone.", "12 = 12. It is 13", "= 2\nFor 13 doors"),
        *("So it covers 13 m2", "An area of 13 m²", "\\boxed{13 \\text{ km}}", "$$\n= 13\n$$"),
    ],
    "10.5": ["#### 10.50", "It costs $10.50."],
    "0.5": ["It costs $.50.", "... and .5"],
    "1080": ["#### 1,080", "The farm has 1,080 hens!"],
    "1234567": ["#### 1,234,567.0"],
    "1080.5": ["She pays $1,080.50 in all", "\\boxed{\\$1,080.50}"],
    "-5": ["#### −5", "#### -$5", "It is -5.", "2 - 7 = -5 degrees"],
    "0": ["#### -0"],
    "7": ["20-7", "5...7", "4, 5, 7"],
    None: ["####", "I do not know.", "", "in m2", "H2O"],
}


@pytest.mark.parametrize(("answer", "texts"), SOLUTIONS.items())
def test_numbers_are_read_from_solutions(answer: str | None, texts: list[str]):
    item = Item("gsm8k-test-1", "", "13")
    task = Gsm8k(Path("test.jsonl"))
    for text in texts:
        assert task.extract(item, text) == answer, text
        assert task.score(item, answer) == (answer == "13")


# A user's own tasks.

OWN = """
from entropix_jax.lab.tasks.task import Task


class Capitals(Task):
    name = "capitals"


number = 7
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with importable modules of a user."""
    (tmp_path / "own_tasks.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("1 / 0")
    (tmp_path / "own_leaving.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sms", "no task 'sms', did you mean 'sums'? (known: sums, word-problems, facts, forks, "),
        ("own_nothing:capitals", "ModuleNotFoundError: No module named 'own_nothing'"),
        ("own_tasks:towns", "own_tasks has no 'towns'"),
        ("own_tasks.py:Capitals", "'Capitals' is a class; name an instance"),
        ("own_tasks:number", "'number' is not a task: inherit from"),
        ("own_broken:task", "importing own_broken failed: ZeroDivisionError: division by zero"),
        ("own_leaving.py:task", "importing own_leaving.py failed: SystemExit: 3"),
    ],
)
def test_bad_task_names_are_refused(own: None, name: str, message: str):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        find_task(name)
    assert str(caught.value).startswith(("no task", f"task '{name}': "))
