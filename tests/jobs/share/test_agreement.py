"""Whether ranks mean the same plan: who differs is named, who has ended or died is not, and waiting for rank 0 is bounded."""

from cachestore.core.keys import Key
from cachestore.core.samples import Sample
from cachestore.jobs.share.agreement import STILL_SECONDS, Intent, counted, in_words, wait_for_rank_0, who_differs
from cachestore.jobs.share.passes import join_pass, publish_done
from cachestore.jobs.share.plan import plan_of_keys, publish_plan
from cachestore.jobs.share.workers import Heartbeat
from tests.fakes import Clock, FakeEncoder, captions, ending, plan_of


def intent(plan, content="c", models=None):
    return Intent("asked", models or {"text": "f" * 64}, content, plan.name)


def meaning(layout, plan, *, launch="launch", rank=1, **options):
    """A heartbeat of another invocation that means this plan."""
    heartbeat = Heartbeat(layout, "", 0, launch, rank, 2)
    heartbeat.detail = intent(plan, **options).as_json()
    return heartbeat


def published(layout, samples, model="a"):
    plan = plan_of(samples, [FakeEncoder(model=model)])
    publish_plan(layout, plan)
    return plan


def differ(layout, mine):
    return [shown.worker for shown, _theirs in who_differs(layout, mine, worker="mine")]


def test_alone_nobody_differs(layout):
    assert who_differs(layout, intent(plan_of([], [])), worker="mine") == []


def test_who_means_the_same_plan_does_not_differ(layout):
    plan = published(layout, captions("a"))
    with meaning(layout, plan):
        assert differ(layout, intent(plan)) == []


def test_who_was_asked_for_something_else_does_not_differ(layout):
    one, other = published(layout, captions("a")), published(layout, captions("b"))
    with meaning(layout, other) as heartbeat:
        heartbeat.detail = {**heartbeat.detail, "asked": "something else"}
        heartbeat.write()
        assert differ(layout, intent(one)) == []


def test_an_invocation_that_lists_other_samples_is_named_with_up_to_five_of_them(layout):
    here = published(layout, [Sample(f"here {n}") for n in range(7)])
    with meaning(layout, published(layout, [Sample("there")]), content="other") as heartbeat:
        assert differ(layout, intent(here)) == [heartbeat.worker]
        [found] = who_differs(layout, intent(here), worker="mine")
    words = in_words(layout, intent(here), *found)
    assert "rank 1" in words
    assert "only here: 'here 0', 'here 1', 'here 2', 'here 3', 'here 4', …" in words
    assert "only there: 'there'" in words


def test_an_invocation_with_other_captions_of_the_same_samples_is_named_with_them(layout):
    here, there = published(layout, captions("a", "b")), published(layout, captions("a", "c"))
    with meaning(layout, there, content="other"):
        [found] = who_differs(layout, intent(here), worker="mine")
    assert "other captions or files for '0001'" in in_words(layout, intent(here), *found)


def test_an_invocation_with_another_model_is_named_with_its_fingerprint(layout):
    here, there = published(layout, captions("a")), published(layout, captions("a"), model="b")
    with meaning(layout, there, models={"text": "e" * 64}):
        [found] = who_differs(layout, intent(here), worker="mine")
    assert f"text: {'f' * 12} here, {'e' * 12} there" in in_words(layout, intent(here), *found)


def test_a_plan_that_is_not_published_yet_is_told_apart_by_its_content(layout):
    here, there = published(layout, captions("a")), plan_of(captions("b"), [FakeEncoder()])
    with meaning(layout, there, content="other"):
        [found] = who_differs(layout, intent(here), worker="mine")
    assert "content other there, c here" in in_words(layout, intent(here), *found)


def test_keys_are_named_where_there_are_no_samples(layout):
    recipe = FakeEncoder().recipe
    here, there = plan_of_keys(recipe, [Key(b"a" * 16)]), plan_of_keys(recipe, [Key(b"b" * 16)])
    publish_plan(layout, here)
    publish_plan(layout, there)
    with meaning(layout, there, content="other"):
        [found] = who_differs(layout, intent(here), worker="mine")
    assert f"only there: '{'62' * 16}'" in in_words(layout, intent(here), *found)


def test_who_has_ended_or_died_or_has_not_noticed_the_end_of_its_pass_does_not_differ(layout):
    here, there = published(layout, captions("a")), published(layout, captions("b"))
    with meaning(layout, there):
        pass
    assert differ(layout, intent(here)) == []
    with meaning(layout, there) as died:
        died._lock.release()
        assert differ(layout, intent(here)) == []
    ref = join_pass(layout, there.name, "launch")
    publish_done(layout, ref, ending(there.name), ["launch"])
    with meaning(layout, there) as heartbeat:
        heartbeat.join(ref.plan, ref.number, "launch")
        assert differ(layout, intent(here)) == []


# Waiting for rank 0


def wait(layout, heartbeat, is_done, clock, **options):
    return wait_for_rank_0(layout, heartbeat, is_done, clock=clock, sleep=clock.sleep, **options)


def test_what_is_done_is_not_waited_for_and_without_a_rank_0_only_as_long_as_asked(layout):
    clock = Clock()
    assert wait(layout, Heartbeat(layout, "", 0, "launch", 1, 2), lambda: True, clock)
    assert clock.now == Clock().now
    assert not wait(layout, Heartbeat(layout, "", 0, "launch", 1, 2), lambda: False, clock, unseen_seconds=3.0)
    assert 3.0 <= clock.now - Clock().now < 4.0


def test_rank_0_is_waited_for_while_its_count_rises_and_no_longer(layout):
    clock = Clock()
    with Heartbeat(layout, "", 0, "launch", 0, 2) as first:

        def planning():
            if clock.now < 1020.0:
                first.count += 1
                first.write()
            return False

        assert not wait(layout, Heartbeat(layout, "", 0, "launch", 1, 2), planning, clock)
    assert 1019.0 + STILL_SECONDS <= clock.now < 1021.0 + STILL_SECONDS


def test_a_rank_0_of_another_launch_or_at_work_is_not_waited_for(layout):
    with Heartbeat(layout, "", 0, "another", 0, 2), Heartbeat(layout, "", 0, "launch", 0, 2) as first:
        first.rise(phase="working")
        assert not wait(layout, Heartbeat(layout, "", 0, "launch", 1, 2), lambda: False, Clock())


def test_a_rank_0_that_was_started_by_hand_is_waited_for_where_it_means_the_same_plan(layout):
    clock, plan = Clock(), published(layout, captions("a"))
    with meaning(layout, plan, launch="by hand", rank=0), meaning(layout, plan, launch="by another", rank=1) as heartbeat:
        assert not wait(layout, heartbeat, lambda: False, clock)
    assert clock.now - Clock().now >= STILL_SECONDS


def test_a_rank_0_that_died_while_planning_is_not_waited_for(layout):
    """Its heartbeat says for ever that it is planning, and every later run of the plan would wait for it."""
    clock, plan = Clock(), published(layout, captions("a"))
    with meaning(layout, plan, rank=0) as died:
        died._lock.release()
        assert not wait(layout, Heartbeat(layout, "", 0, "launch", 1, 2), lambda: False, clock)
    assert clock.now == Clock().now


def test_the_heartbeat_rises_while_samples_pass(layout):
    heartbeat = Heartbeat(layout, "", 0, "launch", 0, 1, clock=Clock())
    heartbeat._written_at = 1000.0
    assert len(list(counted(captions(*map(str, range(2500))), heartbeat))) == 2500
    assert heartbeat.count == 3
    assert list(counted([], heartbeat)) == []
