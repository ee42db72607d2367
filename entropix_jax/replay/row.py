"""The replay of one row, stage by stage: measure, classify, propose, filter, draw, control, commit.

Recorded numbers are compared with their recomputed values, and then used for the decisions after
them. Where a decision depends on numbers within rounding, both outcomes are possible, and the
recorded one is accepted.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, starmap, takewhile
from typing import Any

import numpy as np

from entropix_jax.names import REGIMES
from entropix_jax.replay import formulas, sentences
from entropix_jax.replay.controls import CONTROLS, MAY
from entropix_jax.replay.formulas import PARAMETERS, Place, Proposal, log_softmax
from entropix_jax.replay.state import (
    MAX_REACH,
    Doubt,
    Entry,
    Line,
    Plan,
    Reading,
    RowState,
    Seen,
    Tally,
    Verdict,
)
from entropix_jax.replay.threefry import row_key
from entropix_jax.text.intents import intent_entropy

MAX_ATTEMPTS, MAX_WIDTH = 8, 10
LOOK_AHEAD = 64  # tokens that the model reads at once
# Counts that are never restored.
BUDGETS = """inject.begun lookup.begun branch.begun branch.forwards clarify.begun backspace
    phrases""".split()


class Row(RowState):
    """One row of a trace while it is replayed."""

    def run(self) -> None:
        """Replays all lines of the row. Raises Doubt at the first that does not follow."""
        while True:
            while self.is_moved():
                self.move(self.moves.pop(0))
            is_open = any(entry.line["type"] == "retracted" for entry in self.live)
            if self.reason is not None or not (is_open or self.at < len(self.lines)):
                break
            self.step()
        self.finish()

    def step(self) -> None:
        """Replays one step: the row commits a token, forks, waits or goes back."""
        self.near = False
        seen = self.observe(self.tokens, self.tally, self.bans, -1, self.line_here())
        if seen is None:
            self.reason = "error"
            return
        self.forwards += self.generated > 0
        self.reach = self.find_reach()
        first: Doubt | None = None
        for plan in self.plans(seen):
            doubt = self.difference(plan)
            if doubt is None:
                break
            first = first or doubt
        else:
            assert first is not None
            raise first
        self.near |= first is not None
        self.carry_out(plan, seen)
        self.rounded += self.near

    # Measure and classify

    def read(
        self, tokens: Sequence[int], ahead: Sequence[int] = (), is_branch: bool = False
    ) -> Reading:
        """Returns the model's reading after the last token. `ahead` probably follows."""
        count = len(tokens)
        path, start, readings = self.readings.get(is_branch, ([], 0, []))
        if not (start < count and path[:count] == [*tokens]):
            path, start = [*tokens, *ahead][: count + LOOK_AHEAD - 1], count - 1
            readings = self.model.read(path, start)
            self.readings[is_branch] = path, start, readings
        return readings[count - 1 - start]

    def observe(
        self,
        tokens: Sequence[int],
        tally: Tally,
        bans: Sequence[int],
        branch: int,
        line: Line | None,
        ahead: Sequence[int] | None = None,
    ) -> Seen | None:
        """Measures the distribution after some tokens, and compares a line with it. Returns None
        if a logit is NaN or infinite."""
        if ahead is None:
            following = enumerate(self.lines[self.at : self.at + LOOK_AHEAD], len(tokens))
            ahead = [line["token_id"] for at, line in following if line["position"] == at]
        reading, v = self.read(tokens, ahead, branch >= 0), self.v
        if not np.isfinite(reading.logits).all():
            return None
        generated = len(tokens) - len(self.prompt)
        breakers, states = self.texts["dry.breakers"], tally.states
        log_probs, epsilon = log_softmax(reading.logits), self.model.epsilon
        place = Place(
            v, self.key, tokens, generated, log_probs, bans, branch, states, breakers, epsilon
        )
        metrics = formulas.measure(place, reading)
        if line is not None:
            self.check(line, "metrics", **metrics)
            metrics = {name: float(np.float32(line[name])) for name in metrics}
        mean, squares = tally.moments
        deviation = metrics["entropy"] - mean
        mean += deviation / (generated + 1)
        squares += deviation * (metrics["entropy"] - mean)
        metrics["sequence_varentropy"] = squares / (generated + 1)
        means = formulas.update_means(tally.means, metrics, generated)
        p_wrong = None if self.table is None else formulas.p_wrong(self.table, means)
        if line is not None:
            self.check(line, "metrics", p_wrong=p_wrong)
            p_wrong = line["p_wrong"]
        metrics["p_wrong"] = math.nan if p_wrong is None else float(np.float32(p_wrong))
        viewed = formulas.view(v, reading.logits)
        if viewed is not None:
            metrics["entropy"], metrics["varentropy"] = viewed
        bounds = formulas.thresholds(v, tally.drift)
        slack = 0.0 if line is not None and viewed is None else self.tolerance
        regimes = formulas.regimes(v, metrics, bounds, slack)
        rounds = formulas.count_rounds(v, tokens, generated)
        metrics = formulas.as_configured(v, metrics, bounds.tolist(), log_probs.size)
        if line is not None:
            variance = metrics["sequence_varentropy"]
            self.check(line, "metrics", sequence_varentropy=variance)
            self.near |= line["regime"] != regimes[0]
            self.check(line, "regime", regime=tuple(regimes), loop=rounds > 0)
            self.check(line, "metrics", confidence=formulas.confidence(v, metrics))
            regimes = [line["regime"]]
        return Seen(place, reading, metrics, regimes, rounds, (mean, squares), means)

    # Propose, draw and control

    def plans(self, seen: Seen) -> Iterator[Plan]:
        """Yields the outcome of the step, then those that it may have within rounding."""
        penalised = formulas.penalise(seen.reading.logits, seen.place)
        for regime in seen.regimes:
            p = self.propose(seen, regime)
            plan = Plan(regime, p, p.action, -1, Verdict("commit"), *[penalised] * 3)
            if self.tally.queue:
                action, token = self.tally.queue_action, self.tally.queue[0]
                yield replace(plan, action=action, token=token, verdict=Verdict("force"))
                continue
            left, given = formulas.truncate(penalised, seen.place, p)
            for token in self.outcomes(seen.place, penalised, p):
                yield self.control(replace(plan, token=token, left=left, given=given), seen)

    def propose(self, seen: Seen, regime: str) -> Proposal:
        """Returns the proposal of the arm that serves the row, with the recorded parameters."""
        v, rounds = self.v, seen.rounds
        if self.again is not None:
            return self.again
        served = "start" if self.generated < v["start.tokens"] else regime
        arm = v[f"arms.{'loop' if rounds > 0 else served}"]
        p = formulas.ARMS[arm](v, seen.metrics, {name: rule(self) for name, rule in MAY.items()})
        if rounds > 0:
            hot = p.temperature * (1 + v["loop.heating"] * (rounds - 1))
            p = replace(p, temperature=min(hot, v["loop.hottest"]))
        return self.recorded(p)

    def recorded(self, proposal: Proposal) -> Proposal:
        """Returns a proposal with the parameters of the next line, if they agree."""
        line = self.line_here()
        if line is None or not all(self.same(line[n], getattr(proposal, n)) for n in PARAMETERS):
            return proposal
        numbers = (float(np.float32(line[name])) for name in ("temperature", "top_p", "min_p"))
        temperature, top_p, min_p = numbers
        top_k = (line["top_k"],)
        return replace(proposal, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    def outcomes(
        self, place: Place, penalised: np.ndarray, p: Proposal, stream: str | None = None
    ) -> list[int]:
        """Returns the drawn token, then those that may be drawn within rounding."""
        if stream is None:
            stream = "candidate" if p.candidates > 1 else "draw"
        numbers = place.uniforms(stream, MAX_WIDTH if place.branch >= 0 else p.candidates)
        numbers = numbers[place.branch :][:1] if place.branch >= 0 else numbers
        groups = self.draws(place, penalised, p, numbers)
        best = [float(place.log_probs[group].min()) for group in groups]
        least = max(one - self.rounding(one) for one in best)
        drawn = [group[0] for group in groups]
        first = max(drawn, key=lambda token: float(place.log_probs[token]))
        highest = place.log_probs + self.rounding(place.log_probs)
        others = {token for group in groups for token in group if highest[token] >= least}
        return [first, *sorted(others - {first})]

    def draws(
        self, place: Place, penalised: np.ndarray, p: Proposal, numbers: np.ndarray
    ) -> list[list[int]]:
        """Returns for each uniform number the token at which the cumulative mass exceeds it, then
        those that it may be within rounding."""
        found: list[dict[int, None]] = [{} for _ in numbers]
        if p.temperature <= 0:
            slack = self.rounding(place.log_probs)
            top = penalised + slack >= (penalised - slack).max()
            order = [int(np.argmax(penalised)), *map(int, np.flatnonzero(top))]
            return [[*dict.fromkeys(order)] for _ in numbers]
        for slack in (0.0, self.tolerance, -self.tolerance):
            left, _ = formulas.truncate(penalised, place, p, slack)
            ids = np.flatnonzero(left > -np.inf)
            sums = np.cumsum(np.exp(left[ids] - left.max()))
            rises = np.diff(sums, prepend=0.0) > 0
            ids, sums = ids[rises], sums[rises]
            for group, number in zip(found, numbers, strict=True):
                shifts = number + np.array([0.0, -self.tolerance, self.tolerance])
                at, low, high = np.searchsorted(sums, shifts * sums[-1], side="right")
                places = [at, *range(low, high + 1)]
                group |= dict.fromkeys(int(ids[min(i, len(ids) - 1)]) for i in places)
        return [[*group] for group in found]

    def control(self, plan: Plan, seen: Seen) -> Plan:
        """Returns the plan with the verdict of the first control that acts."""
        action = plan.action
        for name, decide in CONTROLS.items():
            is_arm = name in MAY
            if is_arm and (action != name or self.again is not None):
                continue
            verdict = decide(self, plan, seen)
            if verdict is not None and self.is_allowed(verdict):
                action = action if verdict.kind == "end" else name
                return replace(plan, action=action, verdict=replace(verdict, name=name))
            action = "sample" if is_arm else action
        return replace(plan, action=action)

    def is_allowed(self, verdict: Verdict) -> bool:
        """Whether a rewind is within reach and leaves a token to draw."""
        if verdict.kind != "rewind":
            return True
        attempts = len(self.live[-verdict.back].bans if verdict.back else self.bans)
        left = len(self.model.texts) - len(self.v["draw.bans"])
        return verdict.back <= self.reach and attempts < MAX_ATTEMPTS and attempts + 1 < left

    def difference(self, plan: Plan) -> Doubt | None:
        """Returns the difference between the next line and a plan, None if it may follow."""
        verdict, position = plan.verdict, len(self.tokens)
        following = self.lines[self.at] if self.at < len(self.lines) else None
        line = following or self.live[-1].line
        if verdict.kind == "rewind":
            goes_to = position - verdict.back
            if following is None or line["position"] <= goes_to:
                return None
            return Doubt(line, "rewind", "position", line["position"], goes_to)
        if following is None or line["position"] != position:
            return Doubt(line, "rewind", "position", line["position"], position)
        if verdict.kind == "fork":
            is_fork = line["branches"] is not None
            return None if is_fork else Doubt(line, "fork", "branches", None, plan.action)
        token = verdict.tokens[0] if verdict.tokens else plan.token
        if verdict.kind == "wait" or line["token_id"] == token:
            return None
        if line["action"] != plan.action:
            return Doubt(line, "proposal", "action", line["action"], plan.action)
        stage = "forced" if verdict.kind == "force" else "draw"
        return Doubt(line, stage, "token_id", line["token_id"], token)

    # Carry out

    def carry_out(self, plan: Plan, seen: Seen) -> None:
        """Applies the verdict of a step to the row."""
        verdict, token = plan.verdict, plan.token
        self.tally.states |= verdict.states
        if verdict.kind == "rewind":
            self.go_back(plan)
        elif verdict.kind == "fork":
            self.fork(plan, seen)
        elif verdict.kind == "wait":
            self.rewindable = 0
            rest = self.lines[self.at : self.at + self.remaining]
            result = takewhile(lambda line: line["action"] == "lookup", rest)
            self.tally.queue = [line["token_id"] for line in result]
            self.tally.queue_action = "lookup"
        else:
            if verdict.tokens:
                self.tally.queue, self.tally.queue_action = [*verdict.tokens], verdict.name
                token = verdict.tokens[0]
            self.commit(token, plan, seen)

    def advance(self, tally: Tally, seen: Seen, action: str) -> None:
        """Moves a tally past one token, of the row or of a branch."""
        v, states, m = self.v, tally.states, seen.metrics
        sure = v["inject.until_confident"] and seen.regimes[0] == "lelv"
        states["inject.cooldown"] = 0 if sure else max(states["inject.cooldown"] - 1, 0)
        if len(tally.queue) == 1 and tally.queue_action == "inject":
            states["inject.cooldown"] = v["inject.cooldown"]
        if not (tally.queue and tally.queue_action == "lookup"):
            states["lookup.cooldown"] = max(states["lookup.cooldown"] - 1, 0)
        calm = np.float32(m["entropy"]) < np.float32(v["think_end.entropy"]) and not tally.queue
        states["think_end"] = states["think_end"] + 1 if calm else 0
        states["clarify.measured"] *= action == "clarify"
        is_asked = len(tally.queue) == 1 and tally.queue_action == "clarify"
        states["question"] += states["question"] > 0 or is_asked
        tally.queue, tally.moments, tally.means = tally.queue[1:], seen.moments, seen.means
        if v["thresholds.dynamic"]:  # stochastic approximation (Robbins and Monro 1951)
            values = np.array([m["entropy"]] * 2 + [m["varentropy"]] * 2, np.float32)
            given = [v.get(f"thresholds.{name}", 0.0) for name in ("h1", "h2", "u1", "u2")]
            below = values < np.array(given, np.float32) * np.exp(tally.drift)
            moved = tally.drift + np.float32(v["thresholds.rate"]) * (self.quantiles - below)
            tally.drift = np.clip(moved, -5, 5).astype(np.float32)

    def end_after(self, token: int) -> str | None:
        """Returns the finish reason of a row that commits a token, None if it continues."""
        if token in self.end_ids:
            return "eos" if token in self.request["eos_ids"] else "stop"
        if self.remaining > 1:
            return None
        is_whole = self.request["budget"] == self.request["max_new_tokens"]
        return "length" if is_whole else "context"

    def commit(self, token: int, plan: Plan, seen: Seen, **extra: Any) -> None:
        """Compares the next line with a committed token, and adds it to the row."""
        line = self.lines[self.at] if self.at < len(self.lines) else self.live[-1].line
        self.check(line, "rewind", position=len(self.tokens))
        before, verdict, proposal = self.tally.copy(), plan.verdict, plan.proposal
        is_drawn = not before.queue and verdict.kind != "fork"
        self.advance(self.tally, seen, plan.action)
        if is_drawn:
            logits = plan.penalised, plan.given
            own = formulas.learn(self.v, self.tally.states, proposal, *logits, token)
            self.tally.states = own
        reason = self.end_after(token) or (verdict.name if verdict.kind == "end" else None)
        expected = {"action": plan.action} | {n: getattr(proposal, n) for n in PARAMETERS}
        if plan.action == "branch" and self.choice:
            extra = {**self.choice, **extra}
            expected |= {name: extra.pop(name) for name in PARAMETERS}
            self.choice = {**self.choice, "branches": None, "ambiguous": None}
        elif "intents" in self.choice:
            extra, self.choice = {**self.choice}, {}
        extra = {"branches": None, "ambiguous": None, "intents": None} | extra
        self.check(line, "proposal", **expected)
        self.check(line, "forced" if before.queue else "draw", token_id=token)
        self.check(line, "metrics", logprob=float(seen.place.log_probs[token]))
        self.check(line, "counts", forwards=self.forwards)
        self.check(line, "fork", **extra)
        self.check_extras(line, seen)
        text = self.stream.push(token) + (self.stream.flush() if reason else "")
        self.check(line, "draw", text=text)
        logprob, after = float(np.float32(line["logprob"])), self.tally.copy()
        self.add(Entry(line, logprob, proposal, before, after, self.bans, text))
        self.bans, self.again, self.reason = [], None, reason
        self.rewindable = min(self.rewindable + 1, MAX_REACH) if is_drawn else 0
        if line["type"] == "token" and self.stopped() >= 0:
            self.reason = "stop"

    def check_extras(self, line: Line, seen: Seen) -> None:
        """Compares the most likely tokens and the layers, where they are recorded."""
        if line["top"] is not None:
            p = np.exp(seen.place.log_probs)
            most = np.sort(p)[::-1]
            for place, (token, text, recorded) in enumerate(line["top"]):
                both = self.same(recorded, float(p[token])), self.same(recorded, float(most[place]))
                if not all(both) or text != self.model.decode([token]):
                    raise Doubt(line, "metrics", f"top[{place}]", recorded, float(most[place]))
        reading = seen.reading
        for name, heads in (("layers", reading.entropy), ("layers_varentropy", reading.varentropy)):
            if (layers := line[name]) is None:
                continue
            pairs = zip(chain(*layers), map(float, heads.flat), strict=False)
            is_whole = [*map(len, layers)] == [heads.shape[1]] * len(heads)
            if not is_whole or not all(starmap(self.same, pairs)):
                raise Doubt(line, "metrics", name, layers, heads.tolist())

    # Rewinds

    def go_back(self, plan: Plan) -> None:
        """Retracts tokens, and bans the token at the position that is drawn again."""
        back, current = plan.verdict.back, self.tally
        rewindable = min(self.reach - back, MAX_REACH - 1)
        if back:
            there = self.live[-back]
            token = there.line["token_id"]
            self.retract(len(self.live) - back)
            proposal, tally, bans = there.proposal, there.before, there.bans
        else:
            token, tally, bans = plan.token, current, self.bans
            proposal = plan.proposal
        if proposal.action == "argmax":
            proposal = formulas.draw(self.v, "sample")
        self.again = replace(proposal, action=plan.verdict.name, candidates=1)
        self.bans, self.rewindable = [*bans, token], rewindable
        self.tally = tally.copy()
        self.tally.states |= {name: current.states[name] for name in BUDGETS}

    # Moves by the caller

    def adopt(self, entries: Sequence[Entry]) -> None:
        """Begins with the tokens of the row that this one was forked from, given as its entries."""
        last = {entry.line["position"]: entry for entry in entries}
        for line in self.lines[: self.request["moves"][0]["kept"]]:
            if (entry := last.get(line["position"])) is None:
                raise Doubt(line, "fork", "position", line["position"], None)
            record, other = ({**one.record, "row": 0, "type": ""} for one in (line, entry.line))
            names = [name for name in {**record, **other} if record.get(name) != other.get(name)]
            for name in names[:1]:
                raise Doubt(line, "fork", name, record.get(name), other.get(name))
            self.add(replace(entry, line=line))

    def is_moved(self) -> bool:
        """Whether the caller moves the row before its next line, perhaps within a branch."""
        return len(self.moves) > 0 and self.moves[0]["lines"] == self.at

    def move(self, move: Mapping[str, Any]) -> None:
        """Moves the row as its caller did: back, to other random numbers, or to forced tokens."""
        self.retract(move["kept"])
        self.tally = self.live[-1].after.copy() if self.live else Tally()
        self.tally.queue, self.tally.queue_action = [*move["forced"]], move["action"]
        rewinds = f"~{move['rewinds']}" if move["rewinds"] else ""
        self.key = row_key(self.seed, self.request["row_id"] + rewinds)
        self.bans, self.again, self.choice, self.reason = [], None, {}, None
        self.rewindable = 0
        self.forwards = max((entry.line["forwards"] for entry in self.entries), default=0)

    # Forks

    def fork(self, plan: Plan, seen: Seen) -> None:
        """Replays the branches of a fork, and commits the best one."""
        line, v, after = self.lines[self.at], self.v, self.tally.copy()
        branches, asks = line["branches"], plan.action == "clarify"
        self.check_candidates(line, plan, seen, [branch["tokens"][0] for branch in branches])
        scores = [
            -math.inf if one["score"] is None else np.float32(one["score"]) for one in branches
        ]
        order = sorted(range(len(branches)), key=lambda index: -scores[index])
        is_close = not asks and len(branches) > 1 and scores[order[1]] > -math.inf
        is_close = is_close and scores[order[0]] - scores[order[1]] < np.float32(v["branch.margin"])
        is_asked = is_close and self.request["ask"]
        texts = {branches[index]["text"] for index in order[:2]}
        chosen = [index for index, branch in enumerate(branches) if branch["chosen"]]
        allowed = order[: 2 if is_asked and len(texts) == 2 else 1]
        if not asks and (len(chosen) != 1 or chosen[0] not in allowed):
            raise Doubt(line, "fork", "chosen", chosen, allowed[0])
        self.advance(after, seen, plan.action)
        for index, branch in enumerate(branches):
            score = self.grow(index, branch["tokens"], plan, seen, after.copy())
            text = self.model.decode(branch["tokens"])
            self.expect(line, "fork", f"branches[{index}].score", branch["score"], score)
            self.expect(line, "fork", f"branches[{index}].text", branch["text"], text)
        evaluated = sum(len(branch["tokens"]) for branch in branches)
        self.forwards += evaluated
        self.rewindable, self.again, self.bans, self.choice = 0, None, [], {}
        if asks:
            self.ask(line, branches)
            return
        tokens = branches[chosen[0]]["tokens"]
        extra = {"branches": branches, "ambiguous": bool(is_close) and len(texts) == 2}
        if is_asked or not (v["branch.commit_all"] or len(tokens) == 1):
            self.tally.states["branch.forwards"] += evaluated
            self.tally.queue_action = "branch"
            self.tally.queue = [*tokens[: self.remaining if v["branch.commit_all"] else 1]]
            self.choice = {name: getattr(plan.proposal, name) for name in PARAMETERS} | extra
            return
        for left, token in zip(range(len(tokens))[::-1], tokens, strict=True):
            self.tally.states["branch.forwards"] += 0 if left else evaluated
            self.commit(token, plan, seen, **extra)
            extra = {}
            if self.is_moved():
                return
            if left:
                line_here = self.line_here()
                seen = self.observe(self.tokens, self.tally, [], -1, line_here) or seen

    def ask(self, line: Line, branches: Sequence[Mapping[str, Any]]) -> None:
        """Takes the host's decision after a fork of `clarify` from the entropy over intents."""
        texts = [branch["text"] for branch in branches if branch["score"] is not None]
        intents = intent_entropy(texts)
        self.expect(line, "fork", "intents", line["intents"], intents)
        self.expect(line, "fork", "chosen", any(branch["chosen"] for branch in branches), False)
        if self.v["clarify.least"] <= intents <= self.v["clarify.most"]:
            self.tally.queue_action = "clarify"
            self.tally.queue = [*self.texts["clarify.prompt"][0]]
        self.choice = {"branches": branches, "intents": line["intents"]}

    def check_candidates(self, line: Line, plan: Plan, seen: Seen, firsts: Sequence[int]) -> None:
        """Raises Doubt if the branches do not begin with the candidates."""
        v, tolerance = self.v, self.tolerance
        if v["branch.sampled"] or plan.action == "clarify":
            numbers = seen.place.uniforms("candidate", MAX_WIDTH)
            groups = self.draws(seen.place, plan.penalised, plan.proposal, numbers)
            expected = [group[0] for group in groups][: len(firsts)]
            fits = all(token in group for token, group in zip(firsts, groups, strict=False))
            counts = plan.verdict.tokens
        else:
            z = plan.penalised
            if v["branch.noise"] > 0:
                place = replace(seen.place, bans=())
                numbers = np.maximum(place.uniforms("noise", z.size), 2.0**-25)
                z = z - v["branch.noise"] * np.log(-np.log(numbers))
            order = np.argsort(-z, kind="stable")[:MAX_WIDTH]
            mass = np.exp((z - z.max()) / v["branch.temperature"])
            counts = []
            for slack in (0.0, tolerance, -tolerance):
                shares = np.where(mass >= v["branch.min_p"] * (1 + slack), mass, 0.0)
                top_p = v["branch.top_p"] - slack if v["branch.top_p"] < 1 else math.inf
                before = np.cumsum(shares[order]) - shares[order]
                admitted = (before < top_p * shares.sum()) & (shares[order] > 0)
                counts += [min(max(int(admitted.sum()), 1), width) for width in plan.verdict.tokens]
            expected = [int(token) for token in order[: counts[0]]]
            gaps = (abs(z[a] - z[b]) for a, b in zip(firsts, order, strict=False))
            fits = max(gaps) <= tolerance * (1 + abs(z.max())) and len({*firsts}) == len(firsts)
        if not fits or len(firsts) not in counts:
            raise Doubt(line, "fork", "candidates", [*firsts], expected[: counts[0]])
        self.near |= [*firsts] != expected

    def grow(
        self, index: int, tokens: Sequence[int], plan: Plan, seen: Seen, tally: Tally
    ) -> float | None:
        """Replays one branch. Returns its score, None if it is not finite. `tally` is the row's
        after the first token."""
        v, line, place, left = self.v, self.lines[self.at], seen.place, plan.left
        name, total = plan.action, np.zeros(3)
        asks = name == "clarify"
        depth_limit = v["clarify.tokens" if asks else "branch.depth"]
        heat = v["clarify.temperature" if asks else "branch.rollout_temperature"]
        for depth, token in enumerate(tokens, 1):
            text, is_last = [*self.tokens, *tokens[:depth]], depth == len(tokens)
            log_probs = log_softmax(left) if v["branch.processed"] else place.log_probs
            after = self.observe(text, tally, (), index, None, tokens[depth:])
            if after is None:
                return None
            m = after.metrics
            total += [log_probs[token], m["entropy"], m["varentropy"]]
            is_over = token in self.end_ids or depth >= depth_limit
            is_over |= depth >= self.remaining or self.ends_branch(token, v[f"{name}.until"])
            stays = [regime for regime in after.regimes if regime in ("lehv", "hehv")]
            by_regime = v[f"{name}.until"] == "regime"
            may_end = is_over or (by_regime and len(stays) < len(after.regimes))
            may_continue = not is_over and (not by_regime or len(stays) > 0)
            if not (may_end if is_last else may_continue):
                where = f"length of branches[{index}]"
                raise Doubt(line, "fork", where, len(tokens), "another one")
            if is_last:
                break
            place = after.place
            penalised = formulas.penalise(after.reading.logits, place)
            rollout = formulas.draw(v, name, temperature=heat)
            left, _ = formulas.truncate(penalised, place, rollout)
            drawn = self.outcomes(place, penalised, rollout, "rollout")
            if tokens[depth] not in drawn:
                where = f"branches[{index}].tokens[{depth}]"
                raise Doubt(line, "fork", where, tokens[depth], drawn[0])
            self.near |= tokens[depth] != drawn[0]
            self.advance(tally, after, name)
        logprob, entropy, varentropy = total / len(tokens)
        score = logprob - v["branch.entropy_weight"] * entropy
        score = float(score - v["branch.varentropy_weight"] * varentropy)
        return score if math.isfinite(score) else None

    def ends_branch(self, token: int, until: str) -> bool:
        """Whether a token ends a branch by its text."""
        pattern = sentences.ENDS.get(until)
        return pattern is not None and pattern.fullmatch(self.model.texts[token]) is not None

    # The end

    def finish(self) -> None:
        """Compares the row's end and the footer's counts."""
        ended, footer = self.ended, self.footer
        if self.at < len(self.lines):
            line = self.lines[self.at]
            raise Doubt(line, "end", "type", line["type"], f"the end ({self.reason})")
        for entry in self.live:
            self.check(entry.line, "rewind", type="token")
        reason, recorded = self.reason, ended["finish_reason"]
        if reason is None and recorded == "error" and self.observe_error():
            reason = "error"
        by_host = reason is None and recorded in ("interrupt", "cancelled")
        lines, text = [entry.line for entry in self.live], "".join(e.text for e in self.live)
        stop = self.stopped()
        if not by_host and recorded != reason:
            raise Doubt(footer, "end", "finish_reason", recorded, reason or "running")
        counts: dict[str, Any] = {
            "text": text if stop < 0 else text[:stop],
            "tokens": len(lines),
            "retracted": self.retracted,
            "forwards": lines[-1]["forwards"] if lines else 0,
        }
        for name, values in (("regime", REGIMES), ("action", ())):
            found = [line[name] for line in lines]
            counts[f"{name}s"] = {one: found.count(one) for one in (*values, *dict.fromkeys(found))}
        if lines:
            sizes = [line["token_confidence"] for line in lines]
            window = min(self.v["confidence.window"], len(sizes))
            sums = np.cumsum([0.0, *sizes])
            groups = (sums[window:] - sums[:-window]) / window
            counts |= {
                "mean_confidence": float(np.mean(sizes)),
                "lowest_group_confidence": float(groups.min()),
                "tail_confidence": float(groups[-1]),
                "mean_self_certainty": float(np.mean([line["self_certainty"] for line in lines])),
            }
        for name, value in counts.items():
            where = f"{name} of row {ended['row']}"
            self.expect(footer, "counts", where, ended.get(name), value)

    def observe_error(self) -> bool:
        """Whether the row's next logits are NaN or infinite."""
        return not np.isfinite(self.read(self.tokens).logits).all()
