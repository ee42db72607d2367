"""The driver and an actor of a run on Ray, without a cluster."""

import sys
from unittest.mock import Mock

import pytest

from entropix_jax.errors import Note, UserError
from entropix_jax.host.cluster import Cluster, _Actor
from entropix_jax.version import __version__

exceptions = pytest.importorskip("ray.exceptions", reason="needs the extra ray")


def cluster_of(*names: str, slots: int = 2) -> tuple[Cluster, list[_Actor]]:
    cluster = Cluster(Mock())
    cluster._ray = Mock(exceptions=exceptions)
    cluster._actors = [_Actor(Mock(), (name, 0), name, 0, None, True, slots) for name in names]
    return cluster, [*cluster._actors]


def test_the_last_items_are_shared_evenly() -> None:
    for left, given in ((4, [2, 2]), (sys.maxsize, [3, 1])):
        cluster, actors = cluster_of("a", "b")
        cluster._items, cluster._left = iter(enumerate("wxyz")), left
        for actor in actors:
            cluster._give(actor)
        assert [len(actor.items) for actor in actors] == given


def test_deaths_of_nodes_do_not_count() -> None:
    for message, deaths in (
        ("The actor is dead because its worker process has died.", 1),
        ("The actor died because its node has died.", 0),
        ("The actor 1 is unavailable: it may be available later", 0),
    ):
        cluster, (actor,) = cluster_of("a")
        actor.items = {7: "item"}
        cluster._bury(actor, exceptions.RayError(message))
        assert (cluster._deaths[7], [*cluster._again]) == (deaths, [(7, "item")])


def test_a_node_with_another_version() -> None:
    """It is an error at the start, and a note where other nodes run."""
    told = f"old: has entropix-jax 0.0, not {__version__}: install the same"
    cluster, (actor,) = cluster_of("old", slots=0)
    actor.has_started = False
    cluster._ray.get.return_value = "0.0"
    with pytest.raises(UserError, match=f"^{told}$"):
        cluster._receive(actor)
    actor.handle.load.remote.assert_not_called()
    actor.has_started, cluster._about = False, "the model"
    with pytest.warns(Note, match=f"not used: {told}"):
        cluster._receive(actor)
    assert cluster._actors == []
