"""The ray engine on a real cluster of two nodes, one of which is lost in mid-sweep."""

import dataclasses
import warnings

import pytest

import resroute as rr
from resroute.config import UserError
from resroute.experiments import Design, LocalEngine, RayEngine, make_suite, sweep

pytestmark = pytest.mark.slow


@pytest.fixture
def ray():
    with warnings.catch_warnings():
        # Ray's own, of its dependencies
        warnings.simplefilter("ignore")
        found = pytest.importorskip("ray")
        yield found
        found.shutdown()


@pytest.fixture
def cluster(ray):
    """A head node and a second one, of one core each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    yield made
    # the client first: it cannot outlive its node
    ray.shutdown()
    made.shutdown()


def _suite(make_config, **options):
    base = dataclasses.replace(make_config(rr.PreNorm(), **options), out=None)
    methods = (rr.BlockAttnRes(num_blocks=1), rr.WAV(num_blocks=1))
    design = Design(bases=(base,), layers=(2,), seeds=2, primary_seeds=2, methods=methods)
    return make_suite("paper", design)


@pytest.mark.timeout(600)
def test_cells_of_a_lost_node_go_on_elsewhere_to_the_same_numbers(cluster, make_config, tmp_path):
    # a cell trains for longer than a process takes to start, or two are never under way at once
    suite = _suite(make_config, steps=600, evaluate_every=300, checkpoint_every=25)
    engine = RayEngine(cluster.address)
    assert engine.jobs == 2
    lost = []

    def lose_a_node(states):
        under_way = [s.task.name for s in states if s.state == "running" and 25 < s.step < 550]
        if len(under_way) == 2 and not lost:
            lost.extend(under_way)
            cluster.remove_node(cluster.second, allow_graceful=False)

    said = []
    found = sweep(suite, tmp_path / "ray", engine, watch=lose_a_node, say=said.append)

    assert len(lost) == 2
    assert [state.state for state in found] == ["finished"] * 4
    # the loss of a node is not the cell's: nothing counts as a failed try
    assert said == []
    starts = {
        s.task.name: (tmp_path / "ray" / "logs" / f"{s.task.name}.log").read_text().count(" starts")
        for s in found
    }
    assert sorted(starts.values()) == [1, 1, 1, 2]
    plain = sweep(suite, tmp_path / "local", LocalEngine(2))
    assert [state.loss for state in found] == [state.loss for state in plain]


def test_a_cluster_that_is_not_there_is_one_line(ray):
    with pytest.raises(UserError, match=r"^no Ray cluster at 127\.0\.0\.1:1: "):
        RayEngine("127.0.0.1:1")
