"""Collectives: by hand, and what holds whatever the link."""

from __future__ import annotations

import pytest

from tilefit import estimate, gpus
from tilefit.cost.links import NETWORKS, Fabric, Group, network
from tilefit.errors import UsageError
from tilefit.ops import Collective
from tilefit.ops.collective import FUNCTIONS, ring_bytes

H100 = gpus.get("h100-sxm")
#: Eight machines of eight.
CLUSTER = Fabric(H100, network=NETWORKS["infiniband"])


def test_bytes_of_a_ring_by_hand() -> None:
    # 100 bytes over 4 ranks: three quarters are sent once, for a sum twice.
    sent = {function: ring_bytes(function, 100, 4) for function in FUNCTIONS}
    assert sent == {"all-reduce": 150, "all-gather": 75, "reduce-scatter": 75, "all-to-all": 75, "send": 100}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("group", [Group(2, 2), Group(8, 8), Group(16, 8), Group(8, 1), Group(64, 8)])
def test_never_faster_than_the_link_and_never_shorter_for_more(function: str, group: Group) -> None:
    times = [CLUSTER.time_s(function, 4.0**power, group) for power in range(5, 16)]
    assert times == sorted(times)
    least_s = ring_bytes(function, 4.0**15, group.ranks) / (H100.link_bandwidth_bytes_per_s / 2)
    # NVLink's switches sum up on the way: a GPU sends each byte once instead of twice.
    in_switch = function == "all-reduce" and group == Group(8, 8)
    assert times[-1] > least_s * (0.5 if in_switch else 1.0)


def test_large_messages_reach_what_was_measured_and_small_ones_their_latency() -> None:
    # Public tables, eight H100: 1 GiB of fp16 summed up at about 450 GB/s, 512 bytes in about 16 us.
    large_s = CLUSTER.time_s("all-reduce", 2**30, Group(8, 8))
    assert 2 * 7 / 8 * 2**30 / large_s == pytest.approx(450e9, rel=0.05)
    assert CLUSTER.time_s("all-reduce", 512, Group(8, 8)) == pytest.approx(16e-6, rel=0.15)


def test_integers_are_not_summed_up_by_the_switch() -> None:
    of = [CLUSTER.time_s("all-reduce", 2**29, Group(8, 8), sums=sums) for sums in (True, False)]
    assert of[0] < 0.85 * of[1]


def test_one_gpu_of_each_machine_has_its_share_of_the_cards() -> None:
    # Eight such groups at once fill the cards that one group of all GPUs has to itself.
    whole = CLUSTER.time_s("all-gather", 2**30, Group(64, 8))
    single = CLUSTER.time_s("all-gather", 2**30, Group(8, 1))
    assert single > 5 * whole
    assert CLUSTER.group(8, stride=8) == Group(8, 1)
    assert CLUSTER.group(64) == Group(64, 8)


def test_a_slower_network_takes_longer() -> None:
    names = ("infiniband", "infiniband-hdr", "ethernet")
    fabrics = [Fabric(H100, network=network(name)) for name in names]
    times = [fabric.time_s("all-reduce", 2**28, Group(16, 8)) for fabric in fabrics]
    assert times == sorted(times)


def test_without_a_network_nothing_joins_machines() -> None:
    assert Fabric(H100).time_s("send", 1e6, Group(2, 1)) == float("inf")
    assert not Fabric(H100).reaches(Group(16, 8))


def test_cards_by_number_and_rate_and_an_unknown_name() -> None:
    found = network("8x400")
    assert (found.cards, found.card_bytes_per_s) == (8, 50e9)
    with pytest.raises(UsageError, match="unknown network 'carrier-pigeon'") as error:
        network("carrier-pigeon")
    assert "8x400" in str(error.value.hint)


def test_geforce_cards_without_peer_access_are_slower_than_others_in_the_same_slot() -> None:
    op = Collective("all-reduce", 50_000_000, 2, "bf16")
    geforce, workstation = estimate(op, "rtx-4090"), estimate(op, "rtx-6000-ada")
    assert geforce.time_s > 1.5 * workstation.time_s
    assert geforce.high_s / geforce.time_s > workstation.high_s / workstation.time_s > 1.5
