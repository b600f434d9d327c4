"""Encoded videos to frames: which ones, how they look, and what is refused."""

import os
import subprocess
import sys
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.filter import Graph

from cachestore.core.errors import EncodeFailed
from cachestore.encode.families.resamplers import DEFAULT
from cachestore.encode.pictures import videos
from cachestore.encode.pictures.buckets import Size, crop_box
from cachestore.encode.pictures.resizing import fit
from tests.encode.footage import LOSSLESS, moving, numbered, numbers_of, write, write_sound
from tests.encode.pictures.test_latents import picture

CONTAINERS: dict[str, Any] = {
    "mkv": LOSSLESS,
    "mp4": {"kind": "mp4", "codec": "libx264", "pix_fmt": "yuv420p", "options": {"g": "12", "bf": "3"}},
    "mov": {"kind": "mov", "codec": "libx264", "pix_fmt": "yuv420p", "options": {"g": "250"}},
    "avi": {"kind": "avi", "codec": "mpeg4", "pix_fmt": "yuv420p", "options": {"g": "10", "bf": "2"}},
    "webm": {"kind": "webm", "codec": "libvpx-vp9", "pix_fmt": "yuv420p", "options": {"cpu-used": "8", "deadline": "realtime", "g": "16"}},
    "vp8": {"kind": "webm", "codec": "libvpx", "pix_fmt": "yuv420p", "options": {"deadline": "realtime", "g": "16"}},
    "ts": {"kind": "mpegts", "codec": "mpeg2video", "pix_fmt": "yuv420p", "options": {"g": "12"}},
}


def look(data):
    return videos.measure(BytesIO(data))


def take(data, times, bucket=None):
    size = look(data).size
    bucket = Size(*(bucket or size))
    return videos.take(BytesIO(data), times, bucket, crop_box(size, bucket))


def own(data, start, count):
    return look(data).timeline.take(None, start, count)


def test_no_times_give_no_frames():
    assert take(write(numbered(2)), []).shape == (0, 16, 32, 3)


def test_frames_without_loss_are_the_ones_that_were_written():
    frames = numbered(20)
    data = write(frames)
    assert look(data).size == Size(32, 16)
    assert np.array_equal(take(data, own(data, 0, 20)), frames)


def test_a_frame_is_cut_and_scaled_as_a_picture_is():
    from cachestore.encode.pictures import images

    frames = moving(3)
    data = write(frames)
    expected = fit(images.Image.fromarray(frames[1]), Size(48, 48), None, DEFAULT)
    assert np.array_equal(take(data, own(data, 1, 1), (48, 48))[0], expected)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_part_of_a_video_is_what_stands_there_when_all_of_it_is_decoded(container):
    data = write(moving(60), **CONTAINERS[container])
    line = look(data).timeline
    assert (len(line.times), line.rate.limit_denominator(1)) == (60, 16)
    everything = take(data, line.take(None, 0, 60))
    for start in (0, 7, 30, 43):
        assert np.array_equal(take(data, line.take(None, start, 17)), everything[start : start + 17])
    gaps = [np.abs(everything.astype(int) - frame).mean() for frame in moving(60)]
    assert gaps.index(min(gaps)) in range(60)
    assert all(np.abs(seen.astype(int) - frame).mean() < 12 for seen, frame in zip(everything, moving(60), strict=True))


@pytest.mark.parametrize("times", [[0, 40, 90, 400, 410, 420, 800, 1210, 1211], [0, 1, 2, 3, 1000], [500]])
@pytest.mark.parametrize("rate", [4, 16, 30])
def test_at_a_rate_of_its_own_a_clip_has_the_frames_of_ffmpegs_filter(times, rate):
    data = write(numbered(len(times)), times=times)
    line = look(data).timeline
    expected = filtered(data, rate)
    count = min(len(expected), line.count(Fraction(rate)))
    assert abs(len(expected) - line.count(Fraction(rate))) <= 1
    assert numbers_of(take(data, line.take(Fraction(rate), 0, count))) == expected[:count]


def filtered(data, rate):
    """Which frames FFmpeg's filter `fps` shows at a rate."""
    with av.open(BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        graph = Graph()
        source, fps, sink = graph.add_buffer(template=stream), graph.add("fps", f"fps={rate}"), graph.add("buffersink")
        source.link_to(fps)
        fps.link_to(sink)
        graph.configure()
        shown = []
        for frame in [*container.decode(stream), None]:
            graph.push(frame)
            while True:
                try:
                    pulled: Any = graph.pull()
                    shown.append(pulled.to_ndarray(format="rgb24"))
                except (av.BlockingIOError, av.EOFError):
                    break
    return numbers_of(shown)


@pytest.mark.parametrize(("turn", "turns"), [(0, 0), (90, 1), (180, 2), (-90, 3), (-180, 2)])
def test_a_turned_video_is_upright(turn, turns):
    frames = numbered(3)
    data = write(frames, kind="mov", codec="qtrle", pix_fmt="rgb24", turn=turn)
    assert look(data).size == (Size(16, 32) if turns % 2 else Size(32, 16))
    assert np.array_equal(take(data, own(data, 0, 3)), [np.rot90(frame, turns) for frame in frames])


def test_pixels_that_are_not_square_count_as_wide_as_they_are_shown():
    data = write(numbered(2), kind="mp4", codec="libx264", pix_fmt="yuv420p", options={"x264-params": "sar=2/1"})
    assert look(data).size == Size(64, 16)
    assert take(data, own(data, 0, 2)).shape == (2, 16, 64, 3)


@pytest.mark.parametrize(("space", "number"), [("ITU601", 5), ("ITU709", 1)])
@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (20, 60, 220), (128, 128, 128)])
def test_colours_come_back_by_the_matrix_that_the_file_names(space, number, colour):
    plain = [np.full((16, 32, 3), colour, np.uint8)] * 2
    data = write(plain, kind="mp4", codec="libx264", pix_fmt="yuv444p", options={"crf": "1"}, colorspace=number)
    assert np.abs(take(data, own(data, 0, 1))[0].astype(int) - colour).max() <= 6, space


def test_a_file_that_names_no_matrix_is_of_bt_601_as_ffmpeg_has_it():
    red = [np.full((16, 32, 3), (255, 0, 0), np.uint8)] * 2
    data = write(red, kind="mp4", codec="libx264", pix_fmt="yuv444p", options={"crf": "1"})
    assert np.abs(take(data, own(data, 0, 1))[0].astype(int) - (255, 0, 0)).max() <= 6


def test_transparency_is_on_white():
    clear = [np.zeros((16, 32, 4), np.uint8)] * 2
    data = write(clear, pix_fmt="bgra")
    assert (take(data, own(data, 0, 2)) == 255).all()


@pytest.mark.parametrize("pix_fmt", ["gray", "gray16le", "yuv420p10le", "yuv422p", "yuv410p", "rgb48le", "yuva420p"])
def test_every_form_of_pixels_becomes_8_bit_rgb(pix_fmt):
    grey = [np.full((16, 32, 3), level, np.uint8) for level in (0, 100, 200)]
    data = write(grey, pix_fmt=pix_fmt)
    assert np.abs(take(data, own(data, 0, 3)).astype(int) - grey).max() <= 2


def test_its_header_alone_tells_about_as_much():
    for container, options in CONTAINERS.items():
        data = write(moving(60), **options)
        seen, glanced = look(data), videos.estimate(BytesIO(data))
        assert glanced.size == seen.size
        assert abs(glanced.timeline.count(None) - 60) <= 2, container
        assert abs(glanced.timeline.count(Fraction(8)) - seen.timeline.count(Fraction(8))) <= 1, container


def test_sound_beside_it_changes_nothing(tmp_path):
    frames = numbered(16)
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        sound = container.add_stream("pcm_s16le", rate=8000)
        stream = container.add_stream("ffv1", rate=16)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "bgr0"
        noise = av.AudioFrame.from_ndarray(np.zeros((1, 24_000), np.int16), format="s16", layout="mono")
        noise.sample_rate, noise.pts = 8000, 0
        container.mux(sound.encode(noise))
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="bgr0")
            frame.pts, frame.time_base = number, Fraction(1, 16)
            container.mux(stream.encode(frame))
        container.mux([*stream.encode(None), *sound.encode(None)])
    data = path.read_bytes()
    assert len(look(data).timeline.times) == 16
    assert np.array_equal(take(data, own(data, 0, 16)), frames)


# What is refused


def playlist(kind):
    target = Path(__file__).resolve()
    listed = {
        "concat": f"ffconcat version 1.0\nfile '{target}'\n",
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{target}\n#EXT-X-ENDLIST\n",
        "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>',
        "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    }
    return listed[kind].encode()


NO_VIDEOS = {
    "empty": (lambda: b"", "empty"),
    "text": (lambda: b"this is text, and no video at all " * 40, "no known format"),
    "picture": (picture, "no known format"),
    "concat": (lambda: playlist("concat"), "no known format"),
    "hls": (lambda: playlist("hls"), "no known format"),
    "dash": (lambda: playlist("dash"), "no known format"),
    "sdp": (lambda: playlist("sdp"), "no known format"),
    "sound": (write_sound, "no video, but audio"),
    "cover": (lambda: write_sound(cover=picture(8, 8, name="JPEG")), "no video, but audio"),
    "no frames": (lambda: write([]), "incomplete"),
}


@pytest.mark.parametrize("name", NO_VIDEOS)
def test_what_is_no_video_is_refused_with_the_reason(name):
    make, says = NO_VIDEOS[name]
    with pytest.raises(EncodeFailed, match=says):
        look(make())


@pytest.mark.parametrize("container", ["mp4", "mov", "mkv", "avi", "webm"])
@pytest.mark.parametrize("fraction", [0.3, 0.6])
def test_a_file_that_ends_early_is_refused(container, fraction, tmp_path):
    options = dict(CONTAINERS[container])
    if container in {"mp4", "mov"}:  # with its table in front, so that it can be opened at all
        options["container_options"] = {"movflags": "faststart"}
    data = write(moving(160), path=tmp_path / "a", **options)
    with pytest.raises(EncodeFailed):
        look(data[: int(len(data) * fraction)])
    if container in {"mp4", "mov"}:
        with pytest.raises(EncodeFailed):
            look(data[:-1])


@pytest.mark.parametrize("container", ["mkv", "mp4", "webm"])
def test_a_frame_that_is_damaged_is_never_taken_for_a_whole_one(container):
    data = bytearray(write(moving(40), **CONTAINERS[container]))
    line = look(bytes(data)).timeline
    whole = take(bytes(data), line.take(None, 0, 33))
    middle = len(data) // 2
    data[middle : middle + 400] = np.random.default_rng(0).bytes(400)
    before = line.take(None, 0, 33)
    with pytest.raises(EncodeFailed):
        take(bytes(data), before)
    first = videos.take(BytesIO(bytes(data)), before[:5], Size(96, 64), crop_box(Size(96, 64), Size(96, 64)))
    assert np.array_equal(first, whole[:5])  # those before it are


def test_packets_that_promise_more_frames_than_come_are_refused():
    data = write(numbered(20))
    times = own(data, 0, 20)
    with pytest.raises(EncodeFailed):
        take(data, [times[0], times[1], times[1] + 1])


def test_a_video_whose_frames_change_their_size_is_refused():
    buffer, tick = BytesIO(), Fraction(1, 16)
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("mjpeg", rate=16)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuvj420p"
        container.start_encoding()
        for number, (width, height) in enumerate([(32, 16), (32, 16), (16, 32)]):
            encoder = av.CodecContext.create("mjpeg", "w")
            encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = width, height, "yuvj420p", tick
            frame = av.VideoFrame.from_ndarray(np.zeros((height, width, 3), np.uint8), format="rgb24").reformat(format="yuvj420p")
            for packet in [*encoder.encode(frame), *encoder.encode(None)]:
                packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, tick
                container.mux(packet)
    data = buffer.getvalue()
    assert take(data, own(data, 0, 2)).shape == (2, 16, 32, 3)
    with pytest.raises(EncodeFailed):
        take(data, own(data, 0, 3))


@pytest.mark.parametrize(("version", "names"), [("18.1.0", {"metadata_errors"}), ("19.0.2", set()), ("20.0.0rc1", set())])
def test_no_version_of_pyav_gets_an_argument_that_it_refuses(version, names):
    assert videos.reading_tags(version).keys() == names


def test_a_video_with_a_tag_that_is_not_utf_8_is_read():
    data = write(numbered(3))
    assert b"Lavf" in data
    other = data.replace(b"Lavf", b"La\xffv")
    assert np.array_equal(take(other, own(other, 0, 3)), take(data, own(data, 0, 3)))


def test_an_error_of_reading_is_no_fault_of_the_video():
    class Failing(BytesIO):
        def read(self, size=-1, /):
            if self.tell() > 2000:
                raise OSError("input/output error")
            return super().read(size)

    with pytest.raises(OSError):
        videos.measure(Failing(write(moving(60))))


def test_no_thread_is_left_and_none_is_started():
    data = write(moving(60, size=(320, 240)), **CONTAINERS["mp4"])
    before = os.listdir("/proc/self/task")
    seen = []

    class Watched(BytesIO):
        def read(self, size=-1, /):
            seen.append(len(os.listdir("/proc/self/task")))
            return super().read(size)

    size = videos.measure(Watched(data)).size
    videos.take(Watched(data), own(data, 0, 50), Size(64, 48), crop_box(size, Size(64, 48)))
    assert max(seen) == len(before)
    assert os.listdir("/proc/self/task") == before


def test_nothing_is_written_to_the_terminal(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(write(moving(60), **CONTAINERS["mp4"])[:-900])
    code = "from cachestore.encode.pictures import videos; import sys\ntry: videos.measure(open(sys.argv[1], 'rb'))\nexcept Exception: pass"
    ran = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=True)
    assert (ran.stdout, ran.stderr) == (b"", b"")


_LOOKS = """
import io, resource, sys
from cachestore.core.errors import EncodeFailed
from cachestore.encode.pictures import videos
data = sys.stdin.buffer.read()
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for look in (videos.measure, videos.estimate):
    try:
        look(io.BytesIO(data))
    except EncodeFailed:
        pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def forged(what):
    """A video of 3 frames whose header states more than there is."""
    if what == "frames":
        data = bytearray(write(moving(3), kind="mp4", codec="mpeg4", pix_fmt="yuv420p"))
        count = data.index(b"stts") + 12
        data[count : count + 4] = (0x7FFFFFFF).to_bytes(4, "big")
    else:
        data = bytearray(write(moving(3, (256, 256))))
        for name in (b"\xb0\x82\x01\x00", b"\xba\x82\x01\x00"):
            at = data.index(name) + 2
            data[at : at + 2] = (16_000).to_bytes(2, "big")
    return bytes(data)


@pytest.mark.parametrize("what", ["frames", "pixels"])
def test_a_header_that_states_too_much_takes_no_memory(what):
    done = subprocess.run([sys.executable, "-c", _LOOKS], input=forged(what), capture_output=True, timeout=50, check=True)
    assert int(done.stdout) < 300
