"""What the scheduler decides, carried out by a device made of numbers alone."""

import dataclasses

import numpy as np
import pytest

from kvjax.engine.accounts import Accounts
from kvjax.engine.decisions import (
    Begin,
    Chunk,
    Compress,
    Decision,
    Decode,
    Insert,
    Preempt,
    Remove,
)
from kvjax.engine.scheduler import Scheduler
from tests.engine.scheduled import BLOCK, HEADS, SIZES, STEPS, Device, request_of


def test_a_chunk_that_no_pool_holds_ends_its_request():
    """Nobody has a block that could be freed for it: it would run again for ever."""
    device = Device(4 * HEADS)
    long, short = request_of(0, 100, 8), request_of(1, 8, max_tokens=4)
    for request in (long, short):
        device.scheduler.add(request)
    device.rounds()
    assert (long.finish_reason, short.finish_reason) == ("pool", "length")


def test_a_round_is_prompts_and_then_decode_steps():
    device = Device(100 * HEADS)
    first, second, third = (request_of(n) for n in range(3))
    for request in (first, second, third):
        device.scheduler.add(request)
    # Two prompts of 20 tokens do not fit into a chunk of 32.
    assert device.round() == [
        Begin(first),
        Chunk(first, 20, False),
        Insert(first),
        Begin(second),
        Decode((first,), 1, None),
    ]
    assert device.round()[:3] == [Chunk(second, 20, False), Insert(second), Begin(third)]
    assert device.round() == [
        Chunk(third, 20, False),
        Insert(third),
        Decode((first, second, third), STEPS, None),
    ]
    # Ended at the report of these steps, out at once.
    device.round()
    assert device.log == [Decode((first, second, third), STEPS, None), Remove((0, 1))]
    assert device.scheduler.running == [third]


def test_the_next_chunk_runs_behind_the_decode_steps():
    """It is a part of the next round, which runs as many tokens of prompts as others do."""
    device = Device(100 * HEADS, ahead=True)
    first, long = request_of(0), request_of(1, 60)
    for request in (first, long):
        device.scheduler.add(request)
    assert device.round() == [
        Begin(first),
        Chunk(first, 20, False),
        Insert(first),
        Begin(long),
        Decode((first,), 1, None),
        Chunk(long, 32, False),
    ]
    assert device.round() == [Decode((first,), 1, None), Chunk(long, 28, False)]
    third = request_of(2, 4)
    device.scheduler.add(third)
    # Of the 32 tokens of this round 28 have run, and 4 fit beside them.
    assert device.round() == [
        Insert(long),
        Begin(third),
        Chunk(third, 4, False),
        Insert(third),
        Decode((first, long, third), STEPS, None),
    ]
    # Nothing has run ahead of the next.
    fourth = request_of(3, 32)
    device.scheduler.add(fourth)
    assert device.round()[:3] == [Begin(fourth), Chunk(fourth, 32, False), Insert(fourth)]
    device.rounds()


def test_chunks_in_the_pool_wait_for_the_report_and_so_does_who_has_ended():
    device = Device(100 * HEADS, ahead=True)
    first, long, late = request_of(0), request_of(1, 100, cap=16), request_of(3, 60)
    for request in (first, long):
        device.scheduler.add(request)
    for _ in range(5):
        log = device.round()
        assert not any(isinstance(d, Chunk) for d in log[log.index(device.loops[0]) :])
    device.rounds()
    for request in (request_of(2), late):
        device.scheduler.add(request)
    device.run(device.scheduler.round())
    assert device.scheduler.prefilling is late
    device.stop(late, "abort")
    assert not list(device.scheduler.ahead())


def test_who_waits_for_room_holds_nobody_up():
    device = Device(14 * HEADS)
    first, second = request_of(0, max_tokens=12), request_of(1, 30, max_tokens=2)
    device.scheduler.add(first)
    device.round()
    device.scheduler.add(second)
    assert device.round() == [Decode((first,), STEPS, None)]
    device.rounds()
    assert device.ended == [first, second]


def test_who_waits_for_its_steps_is_overtaken_and_comes_first_when_they_are_there():
    sizes = dataclasses.replace(SIZES, max_batch=1)
    device, ready = Device(40 * HEADS, sizes), False
    slow, running, *later = (request_of(n, max_tokens=12) for n in range(5))
    device.scheduler.ready = lambda request: ready or request is not slow
    for request in (slow, running, later[0]):
        device.scheduler.add(request)
    # It takes no steps from those that run, either.
    device.round()
    assert device.round() == [Decode((running,), 1, None)]
    device.scheduler.leave(later[0])
    assert device.round() == [Decode((running,), STEPS, None)]
    device.scheduler.add(later[0])
    while later[0] not in device.scheduler.running:
        device.round()
    ready = True
    for request in later[1:]:
        device.scheduler.add(request)
    device.rounds()
    assert device.ended == [running, later[0], slow, *later[1:]]


def test_who_waits_is_planned_for_once_while_the_queue_is_the_same():
    sharing = dataclasses.replace(SIZES, share_prefix="always")
    device = Device(num_blocks=600, config=sharing)
    scheduler, planned = device.scheduler, []
    plan, wanted = scheduler._plan, request_of(9)

    def counted(request):
        planned.append(request.order)
        return plan(request)

    scheduler._plan = counted
    scheduler.ready = lambda request: False
    for order in range(3):
        scheduler.add(request_of(order))
    for _ in range(3):
        device.round()
    assert planned == [0, 1, 2]
    scheduler.add(wanted)
    device.round()
    assert planned == [0, 1, 2] * 2 + [9]
    scheduler.leave(wanted)
    device.round()
    scheduler.prefixes.add(np.zeros(4, np.int32), "whole", None)
    device.round()
    assert planned == [0, 1, 2] * 2 + [9] + [0, 1, 2] * 2
    # One that comes back with more tokens is planned for anew, whatever the queue was before.
    (first, *_) = scheduler.waiting
    scheduler.waiting.remove(first)
    scheduler.add(first)
    device.round()
    assert planned[-3:] == [0, 1, 2]
    assert len(planned) == 16


def test_a_prompt_that_fails_leaves_and_the_next_begins():
    device = Device(100 * HEADS)
    first, second = request_of(0), request_of(1)
    for request in (first, second):
        device.scheduler.add(request)

    def fails(decision):
        device.stop(first, "error")

    device.chunk = fails
    decisions = device.scheduler.round()
    seen: list[Decision] = []
    for decision in decisions:
        seen.append(decision)
        device.run([decision])
        if len(seen) == 5:
            break
    assert seen == [Begin(first), Chunk(first, 20, False), Remove((0,)), Begin(second), seen[4]]
    # What the first did not use is left for the second.
    assert seen[4] == Chunk(second, 20, False)


def test_an_interval_is_never_passed():
    device = Device(100 * HEADS)
    every = request_of(0, cap=16, max_tokens=30, compress_every=6)
    device.scheduler.add(every)
    device.scheduler.add(request_of(1, 10, max_tokens=40))
    since = []
    whole = device.compress

    def noted(decision):
        since.extend(request.since_compression for request in decision.requests)
        whole(decision)

    device.compress = noted
    device.rounds()
    assert len(since) == 4
    assert set(since) == {6}


def test_a_long_prompt_is_compressed_between_its_chunks():
    device = Device(100 * HEADS)
    request = request_of(0, 150, cap=16)
    device.scheduler.add(request)
    assert device.round() == [Begin(request), Chunk(request, 32, True)]
    assert device.kvs[0] == 16
    assert device.scheduler.accounts.owned[0, 0] == HEADS * 16 // BLOCK
    device.rounds()
    assert request.finish_reason == "length"


def test_room_is_made_by_compression_first_and_then_by_the_newest():
    device = Device(16 * HEADS)
    requests = [request_of(n, (11, 8, 8)[n], 20, 60, on_prefill=False) for n in range(3)]
    for request in requests:
        device.scheduler.add(request)
    made: list[Decision] = []
    for _ in range(20):
        made += [d for d in device.round() if isinstance(d, Compress | Preempt)]
        if any(isinstance(decision, Preempt) for decision in made):
            break
    # What compression gave back was not enough for a step of all.
    assert made == [Compress((requests[0],)), Preempt(requests[2])]
    assert device.scheduler.waiting == [requests[2]]
    assert requests[2].tokens
    device.rounds()
    assert [r.finish_reason for r in device.ended] == ["length"] * 3


def test_compression_that_helps_nobody_is_not_tried_again():
    device = Device(20 * HEADS)
    first, second = (request_of(n, 20, 12, 60, on_prefill=False) for n in range(2))
    for request in (first, second):
        device.scheduler.add(request)
        device.round()
    running = Decode((first, second), STEPS, None)

    def gives_a_block(decision):
        for request in decision.requests:
            device.kvs[request.slot] -= BLOCK
            device.scheduler.note_compressed(request, HEADS)

    device.compress = gives_a_block
    both = Compress((first, second))
    # Blocks lack still, and nobody has got a token since: somebody has to go.
    for progress, decided in ((False, both), (True, both), (False, Preempt(second))):
        device.log = []
        device.run(device.scheduler.settle([running], progress))
        assert device.log == [decided]


def test_who_is_alone_in_a_full_pool_ends():
    device = Device(8 * HEADS)
    request = request_of(0, 20, max_tokens=40)
    device.scheduler.add(request)
    device.rounds()
    assert request.finish_reason == "pool"
    # The last token is never in the cache.
    assert request.length == 8 * BLOCK + 1


def test_a_chunk_without_room_preempts_the_newest():
    device = Device(45 * HEADS)
    long, other = request_of(0, 150), request_of(1, 40, max_tokens=200)
    device.scheduler.add(long)
    device.round()
    # Let in while the long prompt was not there yet.
    device.scheduler.add(other)
    other.slot = 3
    device.scheduler._slots.remove(3)
    device.scheduler.waiting.remove(other)
    device.scheduler.running.append(other)
    device.kvs[3] = 40
    device.scheduler.accounts.report([3], device.owned()[[3]], np.array([40]))
    seen = [decision for _ in range(4) for decision in device.round()]
    assert Preempt(other) in seen
    device.rounds()
    assert [r.finish_reason for r in device.ended] == ["length", "pool"]


def test_nobody_gives_way_to_a_newer_prompt_that_holds_nothing_yet():
    """Somebody took the blocks that it was let in for, before its first chunk."""
    device = Device(100 * HEADS)
    older, long = request_of(0, 40, max_tokens=100), request_of(1, 150)
    device.scheduler.add(older)
    while not device.scheduler.running:
        device.round()
    device.scheduler.add(long)
    whole, device.num_blocks = device.num_blocks, int(device.owned().sum()) + HEADS
    assert device.round()[:3] == [Begin(long), Chunk(long, 32, False), Preempt(long)]
    device.num_blocks = whole
    device.scheduler.accounts.free[:] = device.free
    device.rounds()
    assert [r.finish_reason for r in (older, long)] == ["length", "length"]


def rules_of(decisions) -> list:
    return [decision.rule for decision in decisions if isinstance(decision, Decode)]


def test_requests_of_one_rule_decode_together():
    device = Device(100 * HEADS)
    rules = (None, "a", "b", None)
    requests = [request_of(n, 8, max_tokens=30, rule=rule) for n, rule in enumerate(rules)]
    for request in requests:
        device.scheduler.add(request)
    first, second, third, fourth = requests
    seen = device.round()
    assert seen[-2:] == [Decode((first, second, fourth), STEPS, "a"), Decode((third,), STEPS, "b")]
    # Whose steps add nothing go with any.
    device.stop(second, "abort")
    assert device.round()[-1] == Decode((first, third, fourth), STEPS, "b")
    device.stop(third, "abort")
    assert device.round()[-1] == Decode((first, fourth), STEPS, None)


def test_requests_that_share_blocks_decode_where_none_is_measured():
    device = Device(100 * HEADS)
    made = [request_of(n, 8, max_tokens=30, rule=rule) for n, rule in enumerate((None, "a", None))]
    made[0].sharing = "whole"
    for request in made:
        device.scheduler.add(request)
    first, second, third = made
    seen = device.round()
    assert seen[-2:] == [Decode((first,), STEPS, None), Decode((second, third), STEPS, "a")]


def test_whoever_found_no_blocks_goes_on_alone():
    """Else one request takes what is freed of it, again and again, and others never have enough."""
    device = Device(29 * HEADS)
    small = request_of(0, 20, 20, 2000, rule="a")
    others = [request_of(n, 20, None, 60, rule="b") for n in (1, 2, 3)]
    for request in (small, *others):
        device.scheduler.add(request)
    for _ in range(200):
        short = device.scheduler._short
        left = any(request.rule in short for request in device.scheduler.running)
        seen = rules_of(device.round())
        assert not left or seen == list(short)
    assert [request.finish_reason for request in others] == ["length"] * 3
    assert 200 < len(small.tokens) < 2000


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", [0, 2, 3, 4, 6, 9])
def test_everybody_ends_and_the_oldest_always_gets_on(seed, ahead):
    rng = np.random.default_rng(seed)
    device = Device(60 * HEADS, ahead=ahead)
    rules = (None, "a", "b", "c")[: 1 + seed % 4]
    requests = [
        request_of(
            n,
            int(rng.integers(1, 140)),
            (None, 16, 24)[rng.integers(3)],
            int(rng.integers(1, 60)),
            rules[rng.integers(len(rules))],
            before_preemption=bool(rng.integers(2)),
            on_prefill=bool(rng.integers(4)),
            compress_every=(None, 5)[rng.integers(2)],
        )
        for n in range(60)
    ]
    waiting, preempted, stuck, seen = list(requests), 0, 0, (None, 0, 0)
    for _ in range(2000):
        if not waiting and not list(device.scheduler):
            break
        if waiting and rng.integers(2):
            device.scheduler.add(waiting.pop(0))
        open_ = [request for request in device.scheduler if request.finish_reason is None]
        if open_ and rng.integers(25) == 0:
            device.stop(open_[rng.integers(len(open_))], "abort")
        preempted += sum(isinstance(decision, Preempt) for decision in device.round())
        oldest = min(device.scheduler, key=lambda r: r.order, default=None)
        job = device.scheduler.job
        now = (oldest, oldest and oldest.length, job and job.done)
        stuck = stuck + 1 if oldest and now == seen else 0
        # Somebody else's rule may come first; then room is made, and made again.
        assert stuck <= 8
        seen = now
    assert preempted > 0
    reasons = [request.finish_reason for request in requests]
    assert set(reasons) == {"length", "abort"}
    assert len(device.ended) == len(requests)
    assert device.free == device.num_blocks


def test_every_shard_must_have_room():
    scheduler = Scheduler(SIZES, [50 * HEADS, 50 * HEADS])
    running, request = request_of(0), request_of(1)
    scheduler.add(running)
    scheduler.begin_next()
    scheduler.inserted(running)
    accounts = scheduler.accounts
    need = request.blocks_to_admit() // 2
    assert accounts.owned[0].tolist() == [need, need]
    spare = 50 * HEADS // 100
    for free, fits in (((0, 0), True), ((-1, 0), False), ((0, -1), False)):
        accounts.free[:] = need + spare + np.array(free)
        assert scheduler.fits(request) == fits
    accounts.growth[0, 1] = 1
    accounts.free[:] = need + spare
    assert not scheduler.fits(request)
    scheduler.leave(running)
    assert accounts.free.tolist() == [2 * need + spare] * 2
    assert accounts.growth.sum() == 0


def test_heads_are_counted_by_their_shard():
    accounts = Accounts(2, [10, 10])
    held = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert accounts.by_shard(held).tolist() == [[1 + 2 + 5 + 6, 3 + 4 + 7 + 8]]
    assert accounts.spread(7).tolist() == [4, 4]


def test_shards_with_more_heads_take_more_of_a_sequence():
    accounts = Accounts(2, [12, 12], [6, 3])
    assert accounts.spread(18).tolist() == [12, 6]
    assert accounts.could_hold(18)
    assert not accounts.could_hold(19)
    accounts.report([0], np.array([[3, 9]]), np.array([8]), np.array([[1, 0]]))
    accounts.free[:] = [9, 3]
    assert accounts.have(9)
    assert not accounts.have(13)  # the first would have to give 9, and one is spoken for
    accounts.give_back(0, np.array([2, 1]))
    assert accounts.owned[0].tolist() == [1, 8]
    assert accounts.free.tolist() == [11, 4]


def test_nobody_is_let_in_while_decode_steps_find_too_few_blocks():
    """These may lack copies of shared blocks, which no growth counts: whoever came would be the
    newest, and be preempted in the same round, again and again."""
    device = Device(20 * HEADS)
    first, second = request_of(0, 8, max_tokens=20), request_of(1, 4, max_tokens=2)
    device.scheduler.add(first)
    device.round()
    device.scheduler._short = (None,)
    device.scheduler.add(second)
    assert not device.scheduler.fits(second)
    assert not any(isinstance(decision, Begin) for decision in device.round())
    # The steps have found room this time.
    assert device.scheduler.fits(second)
    device.rounds()
    assert [r.finish_reason for r in device.ended] == ["length", "length"]
