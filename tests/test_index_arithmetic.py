"""csrc/mask.cuh, csrc/philox.cuh and csrc/launch_counters.cuh, compiled for the host, against brute force."""

import ctypes
import random
import shutil
import subprocess

import pytest
from emulator import build
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not (build.cuda_include() / "cuda_bf16.h").exists(),
    reason="needs g++ and CUDA headers",
)
KEYS, SEEN_BY_ALL, QUERIES = 0, 1, 2


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    objects = []
    for source in [build.HERE / "index_arithmetic.cu", *(build.HERE / f"{name}.cpp" for name in build.RUNTIME)]:
        target = folder / f"{source.stem}.o"
        message = build.compile_object(source, target)
        assert message is None, message
        objects.append(str(target))
    subprocess.run(["g++", "-shared", "-o", str(folder / "index.so"), *objects], check=True)
    return ctypes.CDLL(str(folder / "index.so"))


def mask_range(library, which, q_length, k_length, left, right, first, last):
    out = (ctypes.c_int * 2)()
    library.mask_range(which, q_length, k_length, left, right, first, last, out)
    return range(*out)


def sees(i, j, q_length, k_length, left, right):
    distance = j - (i + k_length - q_length)
    return 0 <= j < k_length and (left < 0 or distance >= -left) and (right < 0 or distance <= right)


@st.composite
def masks(draw):
    q_length, k_length = draw(st.integers(1, 24)), draw(st.integers(0, 24))
    return q_length, k_length, draw(st.integers(-1, 26)), draw(st.integers(-1, 26))


@settings(max_examples=400, deadline=None)
@given(mask=masks(), data=st.data())
def test_key_ranges_hold_exactly_what_some_row_or_every_row_sees(library, mask, data):
    first = data.draw(st.integers(0, mask[0] - 1))
    last = data.draw(st.integers(first + 1, mask[0]))
    seen = [{j for j in range(mask[1]) if sees(i, j, *mask)} for i in range(first, last)]
    assert set(mask_range(library, KEYS, *mask, first, last)) == set().union(*seen)
    assert set(mask_range(library, SEEN_BY_ALL, *mask, first, last)) == set.intersection(*seen)


@settings(max_examples=400, deadline=None)
@given(mask=masks(), data=st.data())
def test_query_range_holds_exactly_the_rows_that_see_some_key(library, mask, data):
    first = data.draw(st.integers(0, mask[1]))
    last = data.draw(st.integers(first, mask[1] + 8))  # tiles may reach past the last key
    expected = {i for i in range(mask[0]) if any(sees(i, j, *mask) for j in range(first, last))}
    assert set(mask_range(library, QUERIES, *mask, first, last)) == expected


def launch_counters(library, launches):
    """The counters that launches, triples (stream, captured, asked), get of a fresh set: ranges, None for no counters;
    and how many counters there are."""
    streams, captured, asked = zip(*launches)
    n, count = len(launches), ctypes.c_int()
    numbers, asked_ints = (ctypes.c_int * n)(), (ctypes.c_int * n)(*asked)
    library.launch_counters(
        n, (ctypes.c_uint64 * n)(*streams), (ctypes.c_uint8 * n)(*captured), asked_ints, numbers, ctypes.byref(count)
    )
    return [None if i == -1 else range(i, i + many) for i, many in zip(numbers, asked)], count.value


PER_THREAD, OF_STREAM = 2, 7  # the handle that stands for a stream of each thread; what one stream can have


@settings(max_examples=100, deadline=None)
@given(
    launches=st.lists(
        st.tuples(st.sampled_from((0, 1, PER_THREAD, 2**40, 2**47 + 16)), st.booleans(), st.integers(1, OF_STREAM + 1)),
        min_size=1, max_size=40,
    )
)  # fmt: skip
def test_only_launches_of_one_stream_share_counters(library, launches):
    given, count = launch_counters(library, launches)
    users, first = {}, {}
    for i, ((stream, captured, asked), numbers) in enumerate(zip(launches, given)):
        assert (numbers is None) == (stream == PER_THREAD or not captured and asked > OF_STREAM)
        for number in numbers or ():
            assert number < count
            users.setdefault(number, set()).add(("graph", i) if captured else ("stream", stream))
        if numbers and not captured:
            assert first.setdefault(stream, numbers[0]) == numbers[0]  # a stream keeps its counters
    assert all(len(user) == 1 for user in users.values())


@pytest.mark.parametrize("captured", [False, True])
def test_counters_that_run_out_are_not_shared(library, captured):
    given, count = launch_counters(library, [(8 * i, captured, 5) for i in range(1, 1500)] + [(8, False, 5)])
    *given, first_stream = given
    numbers = [number for numbers in given for number in numbers or ()]
    assert len(set(numbers)) == len(numbers) and max(numbers) < count and given[-1] is None
    assert first_stream == given[0] if not captured else not set(first_stream) & set(numbers)


@pytest.mark.parametrize("left, right", [(-1, -1), (-1, 0), (2**31 - 1, 0), (2**31 - 1, 2**31 - 1), (5, 2**31 - 1)])
def test_ranges_do_not_overflow(library, left, right):
    length = 2**31 - 1
    first, last = length - 64, length
    keys = mask_range(library, KEYS, length, length, left, right, first, last)
    assert keys.start == (0 if left < 0 or left >= first else first - left)
    assert keys.stop == length
    queries = mask_range(library, QUERIES, length, length, left, right, 0, 64)
    assert queries.start == 0
    assert queries.stop == (length if left < 0 or left + 64 > length else 64 + left)


def philox(key, counter, rounds):
    """Philox4x32 of Salmon et al. 2011 (doi 10.1145/2063384.2063405): key of 2 words, counter of 4 -> 4 words."""
    key, x = list(key), list(counter)
    for _ in range(rounds):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ x[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def test_the_generator_of_this_file_gives_the_published_words():
    assert philox([0, 0], [0] * 4, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([0xFFFFFFFF] * 2, [0xFFFFFFFF] * 4, 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_philox_has_seven_rounds_of_the_published_generator(library):
    words, generator = (ctypes.c_uint32 * 4)(), random.Random()
    for _ in range(200):
        key = [generator.getrandbits(32) for _ in range(2)]
        counter = [generator.getrandbits(32) for _ in range(4)]
        library.philox_words((ctypes.c_uint32 * 2)(*key), (ctypes.c_uint32 * 4)(*counter), words)
        assert list(words) == philox(key, counter, 7)


def dropout_mask(library, seed, offset, p, heads, batch, head, queries, keys):
    kept = (ctypes.c_uint8 * (queries * keys))()
    library.dropout_mask(
        ctypes.c_int64(seed), ctypes.c_int64(offset), ctypes.c_float(p), heads, batch, head, queries, keys, kept
    )
    return [list(kept[i * keys : (i + 1) * keys]) for i in range(queries)]


def test_dropout_is_a_function_of_position_alone(library):
    seed = random.getrandbits(63)
    large = dropout_mask(library, seed, 7, 0.3, 4, 2, 3, 96, 80)
    small = dropout_mask(library, seed, 7, 0.3, 4, 2, 3, 33, 17)
    assert [row[:17] for row in large[:33]] == small
    for other in [
        (seed + 1, 7, 0.3, 4, 2, 3),
        (seed, 8, 0.3, 4, 2, 3),
        (seed, 7, 0.3, 4, 2, 2),
        (seed, 7, 0.3, 4, 1, 3),
    ]:
        assert dropout_mask(library, *other, 33, 17) != small


@pytest.mark.parametrize("p", [0.0, 0.1, 1 / 3, 0.5, 0.97])
def test_dropout_keeps_its_share(library, p):
    rows = dropout_mask(library, random.getrandbits(63), random.getrandbits(40), p, 1, 0, 0, 512, 512)
    kept, count = sum(map(sum, rows)), 512 * 512
    assert abs(kept / count - (1 - p)) <= 6 * (p * (1 - p) / count) ** 0.5 + 1e-6
