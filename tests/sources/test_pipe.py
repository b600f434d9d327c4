"""Questions and answers between a worker and the process that holds its pictures."""

import os
import threading

import pytest

from cachestore.files.frames import frame
from cachestore.sources.pipe import PIPE, Answers, PipeFiles, pipe_files


class Held:
    def __init__(self, **pictures):
        self.pictures = pictures

    def read(self, reference):
        if reference == "broken":
            raise ZeroDivisionError
        if reference not in self.pictures:
            raise FileNotFoundError(2, "No such picture", reference)
        return self.pictures[reference], (len(self.pictures[reference]), 7)

    def open(self, reference):
        raise NotImplementedError

    def stat(self, reference):
        return (len(self.pictures[reference]), 7) if reference in self.pictures else None


@pytest.fixture
def line():
    """A worker's end of a line, and the answers that are served to it while the test runs."""
    answers = Answers(Held(a=b"picture a", large=os.urandom(3_000_001), empty=b""))
    ends = answers.new_line()
    asked = PipeFiles(*ends, patience_seconds=30)
    over = threading.Event()

    def serve():
        while not over.is_set():
            answers.serve(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    yield asked, answers
    over.set()
    thread.join()
    answers.close()
    for end in ends:
        os.close(end)


def test_what_is_asked_is_answered(line):
    asked, answers = line
    assert asked.read("a") == (b"picture a", (9, 7))
    with asked.open("a") as (file, _stat):
        assert file.read(3) == b"pic"
    assert asked.stat("a") == (9, 7)
    assert asked.stat("gone") is None
    assert asked.read("empty") == (b"", (0, 7))
    assert asked.read("large")[0] == answers._pictures.pictures["large"]


def test_an_error_costs_its_question_alone(line):
    asked, _answers = line
    with pytest.raises(OSError):
        asked.read("gone")
    with pytest.raises(OSError):
        asked.read("broken")
    assert asked.read("a")[0] == b"picture a"


def test_threads_that_ask_at_once_each_get_their_answer(line):
    asked, answers = line
    wrong = []

    def ask(name):
        wrong.extend(name for _time in range(20) if asked.read(name)[0] != answers._pictures.pictures[name])

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("a", "large", "empty", "a")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_nobody_waits_for_a_caller_that_is_gone():
    answers = Answers(Held())
    ends = answers.new_line()
    asked = PipeFiles(*ends)
    answers.close()
    for _time in range(2):
        with pytest.raises(OSError):
            asked.read("a")
    for end in ends:
        os.close(end)


def test_who_waits_too_long_does_not_take_a_late_answer_for_another_one():
    answers = Answers(Held(a=b"a", b=b"b"))
    ends = answers.new_line()
    asked = PipeFiles(*ends, patience_seconds=0.01)
    with pytest.raises(OSError):
        asked.read("a")
    answers.serve(0.05)
    with pytest.raises(OSError):
        asked.read("b")
    answers.close()
    for end in ends:
        os.close(end)


def test_a_caller_is_not_held_up_by_a_worker_that_takes_no_answer():
    answers = Answers(Held(large=bytes(10_000_000)))
    answers_end, questions_end = answers.new_line()
    os.write(questions_end, frame({"do": "read", "reference": "large"}))
    answers.serve(0.05)  # returns, though nobody reads
    os.close(answers_end)
    answers.serve(0.05)
    os.close(questions_end)
    answers.serve(0.01)
    answers.close()


def test_without_lines_a_caller_passes_its_time():
    answers = Answers(Held())
    answers.serve(0.01)
    answers.close()


def test_a_process_that_nobody_told_asks_nobody():
    assert pipe_files({}) is None


def test_a_worker_asks_over_the_descriptors_that_it_was_told():
    answers = Answers(Held())
    ends = answers.new_line()
    reported = {PIPE: ",".join(map(str, ends))}
    assert pipe_files(reported) is pipe_files(reported)
    answers.close()
    for end in ends:
        os.close(end)
