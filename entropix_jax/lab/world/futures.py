"""The exact distribution of a text's outcome, and the true fork strength of its next terminal."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping

from entropix_jax.lab.strength import LEAST, fork_strength
from entropix_jax.lab.world.grammar import Document, replay


class Futures:
    """Outcome distributions of the documents of one grammar, by enumeration of their continuations
    up to the outcome, hesitations included. No probability mass is dropped, so every continuation
    must reach an outcome or the end of its document."""

    def __init__(
        self,
        document: Callable[[], Document],
        read: Callable[[str], str | None],
        state: Callable[[tuple[str, ...]], Hashable] = lambda said: said,
    ) -> None:
        """Prepares the enumeration.

        Args:
            document: returns a new document.
            read: returns the outcome of a text, None as long as it is open.
            state: whatever determines the outcome distribution after some terminals. Prefixes of
                one state are enumerated once.
        """
        self._document, self._read, self._state = document, read, state
        self._known: dict[Hashable, Mapping[str | None, float]] = {}

    def after(self, said: tuple[str, ...]) -> Mapping[str | None, float]:
        """Returns the probability of each outcome after some terminals; None is no outcome.

        Raises:
            ImpossibleText: the grammar cannot produce them.
        """
        state = self._state(said)
        if state not in self._known:
            self._known[state] = self._enumerate(said)
        return self._known[state]

    def _enumerate(self, said: tuple[str, ...]) -> Mapping[str | None, float]:
        outcome = self._read("".join(said))
        choice = replay(self._document(), said)
        if outcome is not None or choice is None:
            return {outcome: 1.0}
        chances: defaultdict[str | None, float] = defaultdict(float)
        for terminal, p in zip(choice.terminals, choice.probabilities, strict=True):
            for found, share in self.after((*said, terminal)).items():
                chances[found] += p * share
        return chances

    def strength(self, said: tuple[str, ...]) -> float:
        """Returns the true fork strength of the terminal after `said`. Its alternatives are the
        terminals with a probability of at least 0.05.

        Raises:
            ImpossibleText: the grammar cannot produce these terminals.
        """
        choice = replay(self._document(), said)
        if choice is None:
            return 0.0
        pairs = zip(choice.terminals, choice.probabilities, strict=True)
        chances = {terminal: p for terminal, p in pairs if p >= LEAST}
        if len(chances) < 2:
            return 0.0
        futures = [self.after((*said, terminal)) for terminal in chances]
        outcomes = list(dict.fromkeys(outcome for future in futures for outcome in future))
        table = [[future.get(outcome, 0.0) for outcome in outcomes] for future in futures]
        return fork_strength([*chances.values()], table)
