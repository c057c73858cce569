"""Decoded pictures in a cache: the pixels of the decoder, decoded once, also after kills and beside other programs."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

import polyclinic as pc
from common.data.base.image_set import ImageSet
from common.data.base.spec import PictureRendering
from common.data.images import store
from common.data.images.pixel_cache import IN_USE, PIXELS, ROWS, CacheFolderLock, MappedPictures
from common.data.images.pixels import load_pixels_on_device
from common.data.images.reading import DecodedImageFormat
from common.data.images.store import DecodedImageStore, DecodedPictures, DecodingProgress, FileIdentity, decode_pictures
from common.errors import BadInput
from tests.common.data.dicom_files import dicom

FORM = DecodedImageFormat(8, color=False, resize="pad")
SECRET = bytes(range(32))


def write_pictures(folder: Path, count: int, *, color: bool = False, first: int = 0) -> list[Path]:
    """Write pictures that all differ."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"{number}.png" for number in range(first, first + count)]
    for number, file in enumerate(files, start=first):
        random = np.random.default_rng(number)
        shape = (9, 7, 3) if color else (9, 7)
        Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).save(file, format="PNG")
    return files


@pytest.fixture(autouse=True)
def every_set_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SMALL_BYTES", 0)
    monkeypatch.setattr(store, "SETTLED_S", 0.0)


@pytest.fixture
def place(tmp_path: Path) -> DecodedImageStore:
    return DecodedImageStore(tmp_path / "cache")


class Reads:
    """Reads files, and counts how often."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files, self.count = files, 0

    def __call__(self, row: int) -> Path:
        self.count += 1
        return self.files[row]


def decode(
    files: Sequence[Path],
    place: DecodedImageStore,
    form: DecodedImageFormat = FORM,
    reads: Callable[[int], Path] | None = None,
) -> DecodedPictures:
    identities = [FileIdentity.from_path(file) for file in files]
    names = [file.name for file in files]
    return decode_pictures(names, reads or Reads(files), form, place, identify=identities.__getitem__)


def pixels(files: Sequence[Path], form: DecodedImageFormat = FORM) -> NDArray[np.uint8]:
    return decode(files, DecodedImageStore(), form).images


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
@pytest.mark.parametrize("color", [False, True])
def test_a_cache_gives_the_pixels_of_the_decoder(tmp_path: Path, secret: bytes | None, color: bool) -> None:
    files = write_pictures(tmp_path / "images", 20, color=color)
    files.insert(3, tmp_path / "images" / "torn.png")
    files[3].write_bytes(files[0].read_bytes()[:60])
    form, place = replace(FORM, color=color), DecodedImageStore(tmp_path / "cache", secret=secret)
    plain = decode(files, DecodedImageStore(), form)
    for _ in range(2):
        decoded = decode(files, place, form)
        np.testing.assert_array_equal(decoded.images, plain.images)
        assert decoded.rows.tolist() == plain.rows.tolist() == [*range(3), *range(4, 21)]
        assert decoded.skipped == plain.skipped


def test_the_second_start_reads_no_file(tmp_path: Path, place: DecodedImageStore) -> None:
    files = write_pictures(tmp_path / "images", 30)
    first, second = Reads(files), Reads(files)
    decode(files, place, reads=first)
    again = decode(files, place, reads=second)
    assert (first.count, second.count) == (30, 0)
    assert isinstance(again.stored, MappedPictures)
    np.testing.assert_array_equal(again.images, pixels(files))


def test_only_new_and_changed_files_are_decoded(tmp_path: Path, place: DecodedImageStore) -> None:
    files = write_pictures(tmp_path / "images", 10)
    decode(files, place)
    files += write_pictures(tmp_path / "images", 2, first=10)
    Image.fromarray(np.full((9, 7), 77, np.uint8)).save(files[4])
    reads = Reads(files)
    decoded = decode(files, place, reads=reads)
    assert reads.count == 3
    np.testing.assert_array_equal(decoded.images, pixels(files))


def test_a_copy_and_a_new_name_are_read_but_not_decoded(
    tmp_path: Path, place: DecodedImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_pictures(tmp_path / "images", 6)
    expected = pixels(files)
    decode(files, place)
    (tmp_path / "moved").mkdir()
    moved = [file.rename(tmp_path / "moved" / f"x{file.name}") for file in files]
    (tmp_path / "copy.png").write_bytes(moved[2].read_bytes())
    monkeypatch.setattr(store, "decode_picture", None)  # would raise, and leave the picture out
    decoded = decode([*moved, tmp_path / "copy.png"], place)
    np.testing.assert_array_equal(decoded.images, np.concatenate([expected, expected[2:3]]))


def test_a_file_that_has_just_changed_is_read_again(
    tmp_path: Path, place: DecodedImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It may change once more without another time of change, as in Git's "racy" index.
    monkeypatch.setattr(store, "SETTLED_S", 60.0)
    files = write_pictures(tmp_path / "images", 3)
    decode(files, place)
    reads = Reads(files)
    decode(files, place, reads=reads)
    assert reads.count == 3


OTHER_FORMS = {
    "size": replace(FORM, size=9),
    "color": replace(FORM, color=True),
    "resize": replace(FORM, resize="stretch"),
    "window": replace(FORM, rendering=PictureRendering(window=(40.0, 80.0))),
    "frame": replace(FORM, rendering=PictureRendering(frame=1)),
}


@pytest.mark.parametrize("form", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_another_form_is_decoded_by_itself(tmp_path: Path, place: DecodedImageStore, form: DecodedImageFormat) -> None:
    files = write_pictures(tmp_path / "images", 4)
    decode(files, place)
    np.testing.assert_array_equal(decode(files, place, form).images, pixels(files, form))
    np.testing.assert_array_equal(decode(files, place).images, pixels(files))


def test_another_release_of_a_decoder_decodes_again(
    tmp_path: Path, place: DecodedImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_pictures(tmp_path / "images", 4)
    decode(files, place)
    monkeypatch.setattr(store, "_list_decoder_versions", lambda: {"pillow": "another"})
    reads = Reads(files)
    decode(files, place, reads=reads)
    assert reads.count == 4


def test_encrypted_pictures_show_nothing_and_open_with_their_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "flat.png"
    Image.fromarray(np.full((8, 8), 200, np.uint8)).save(file)
    place = DecodedImageStore(tmp_path / "cache", secret=SECRET)
    decode([file], place)
    (stored,) = (tmp_path / "cache").glob(f"*/{PIXELS}")
    assert bytes([200] * 8) not in stored.read_bytes()
    other = replace(place, secret=bytes(32))
    assert decode([file], other).images.tolist() == [[[200] * 8] * 8]
    assert len(list((tmp_path / "cache").glob(f"*/{PIXELS}"))) == 2


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_a_row_that_was_changed_is_refused(tmp_path: Path, secret: bytes | None) -> None:
    files, place = (
        write_pictures(tmp_path / "images", 3),
        DecodedImageStore(tmp_path / "cache", secret=secret, workers=1),
    )
    decode(files, place)
    (stored,) = (tmp_path / "cache").glob(f"*/{PIXELS}")
    content = bytearray(stored.read_bytes())
    content[len(content) // 3 + 6] ^= 1
    stored.write_bytes(content)
    decoded = decode(files, place)
    np.testing.assert_array_equal(decoded.stored[np.array([0, 2])], pixels(files)[[0, 2]])
    with pytest.raises(BadInput, match="not what was written"):
        decoded.stored[np.array([0, 1])]


@pytest.mark.parametrize("row", [0, 57, 99])
def test_pictures_that_are_copied_to_a_gpu_are_checked_before(
    tmp_path: Path, place: DecodedImageStore, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    files = write_pictures(tmp_path / "images", 100)
    images = image_set_of(decode(files, place))
    assert load_pixels_on_device(images, "meta").stored.shape == (100, 1, 8, 8)
    (stored,) = (tmp_path / "cache").glob(f"*/{PIXELS}")
    content = bytearray(stored.read_bytes())
    content[row * 64 + 3] ^= 16
    stored.write_bytes(content)
    with pytest.raises(BadInput, match="not what was written"):
        load_pixels_on_device(image_set_of(decode(files, place)), "meta")


EXCHANGES = {"exchanged": [0, 1, 5, 3, 4, 2, *range(6, 100)], "repeated": [0, 1, 2, 3, 4, 2, *range(6, 100)]}


@pytest.mark.parametrize("order", EXCHANGES.values(), ids=EXCHANGES)
@pytest.mark.parametrize("name", [PIXELS, ROWS])
@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_rows_and_records_that_were_exchanged_are_refused(
    tmp_path: Path, secret: bytes | None, name: str, order: list[int]
) -> None:
    files, place = (
        write_pictures(tmp_path / "images", 100),
        DecodedImageStore(tmp_path / "cache", secret=secret, workers=1),
    )
    decode(files, place)
    (path,) = (tmp_path / "cache").glob(f"*/{name}")
    path.write_bytes(np.frombuffer(path.read_bytes(), np.uint8).reshape(100, -1)[order].tobytes())
    with pytest.raises(BadInput, match="not what was written"):
        _ = decode(files, place).images


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_batches_from_the_disk_are_those_from_memory(tmp_path: Path, secret: bytes | None, color: bool) -> None:
    files, form = write_pictures(tmp_path / "images", 23, color=color), replace(FORM, color=color)
    held, kept = (
        image_set_of(decode(files, place, form))
        for place in (DecodedImageStore(), DecodedImageStore(tmp_path / "cache", secret=secret))
    )
    parts = list(torch.split(torch.randperm(23, generator=torch.Generator().manual_seed(0)), 4))
    for chosen in (np.arange(23), np.array([5, 2, 2, 9])):
        memory, disk = (load_pixels_on_device(images.select_rows(chosen), "cpu") for images in (held, kept))
        rows = [part[part < len(chosen)] for part in parts if (part < len(chosen)).any()]
        for expected, batch in zip(memory.prefetch_batches(rows), disk.prefetch_batches(rows), strict=True):
            assert torch.equal(expected, batch)
            assert expected.stride() == batch.stride()
        for expected, batch in zip(memory.iterate_batches(4), disk.iterate_batches(4), strict=True):
            assert torch.equal(expected, batch)
    assert [
        len(batch) for batch in load_pixels_on_device(kept.select_rows(np.arange(0)), "cpu").iterate_batches(4)
    ] == [0]


def image_set_of(decoded: DecodedPictures) -> ImageSet:
    count = len(decoded.places)
    labels, names = np.zeros((count, 1), np.float32), np.full(count, "")
    return ImageSet(decoded.stored, labels, ("a",), names, names, places=decoded.places)


def test_a_reader_that_is_left_early_ends_its_thread(tmp_path: Path, place: DecodedImageStore) -> None:
    kept = load_pixels_on_device(image_set_of(decode(write_pictures(tmp_path / "images", 9), place)), "cpu")
    before = threading.active_count()
    batches = kept.iterate_batches(1)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.long)])
def test_a_run_ends_in_the_same_model_with_and_without_the_cache(tmp_path: Path, backend: str) -> None:
    files = write_pictures(tmp_path / "images", 60)
    lines = [f"{file.name},p{number // 2},{number % 2},{number // 3 % 2}" for number, file in enumerate(files)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,patient,a,b", *lines]))
    columns = {"image_column": "image", "patient_column": "patient", "label_columns": ["a", "b"]}
    place = {"images": str(tmp_path / "images"), "labels": str(tmp_path / "labels.csv"), "image_size": 16}
    tree = {
        "run": {"method": "surgical", "rounds": 2},
        "model": {"architecture": "tiny_cnn", "channels": 1, "image_size": 16},
        "data": {"kind": "folder", **place, **columns},
        "partition": {"kind": "class_lists", "lists": {"east": ["a", "b"], "north": ["b"]}},
        "simulation": {"backend": "inline"},
    }
    cache = {"simulation.image_cache": str(tmp_path / "cache"), "simulation.backend": backend}
    plain = pc.simulate(tree, settings={"simulation.image_cache_gb": 0}, out=tmp_path / "plain")
    hashes = [pc.simulate(tree, settings=cache, out=tmp_path / name).model_sha256 for name in ("first", "second")]
    assert hashes == [plain.model_sha256] * 2
    assert list((tmp_path / "cache").glob(f"*/{PIXELS}"))


# ---------------------------------------------------------------------- kills and other programs

DECODE = """
import sys, time
from pathlib import Path
from common.data.images import pixel_cache, store
from common.data.images.reading import DecodedImageFormat
store.SMALL_BYTES, store.SETTLED_S, pixel_cache.FLUSH_S = 0, 0.0, 0.05
files, count = sorted(Path(sys.argv[1]).iterdir()), 0
def read(row):
    global count
    count += 1
    time.sleep(float(sys.argv[3]))
    return files[row]
place = store.DecodedImageStore(Path(sys.argv[2]), workers=2)
identities = [store.FileIdentity.from_path(file) for file in files]
form = DecodedImageFormat(8, color=False, resize="pad")
names = [file.name for file in files]
decoded = store.decode_pictures(names, read, form, place, identify=identities.__getitem__)
print(count, int(decoded.images.astype(int).sum()), flush=True)
"""
"""Without torch, whose import takes seconds."""


def start_decoding(images: Path, cache: Path, pause_s: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", DECODE, str(images), str(cache), str(pause_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kept_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob(f"*/{ROWS}"))


def test_a_killed_program_leaves_whole_pictures_that_are_not_decoded_again(
    tmp_path: Path, place: DecodedImageStore
) -> None:
    files = sorted(write_pictures(tmp_path / "images", 200))
    for _ in range(3):
        before = kept_bytes(tmp_path / "cache")
        with start_decoding(tmp_path / "images", tmp_path / "cache", 0.1) as process:
            while kept_bytes(tmp_path / "cache") == before:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
    reads = Reads(files)
    decoded = decode(files, place, reads=reads)
    assert 0 < reads.count < 200
    np.testing.assert_array_equal(decoded.images, pixels(files))


def test_two_programs_at_once_decode_each_picture_once(tmp_path: Path) -> None:
    files = sorted(write_pictures(tmp_path / "images", 40))
    both = [start_decoding(tmp_path / "images", tmp_path / "cache", 0.01) for _ in range(2)]
    counts, sums = zip(*(map(int, process.communicate()[0].split()) for process in both), strict=True)
    assert sum(counts) == 40
    assert sums == (int(pixels(files).astype(int).sum()),) * 2


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 400), which=st.sampled_from([ROWS, "files", PIXELS]))
def test_records_that_a_crash_cut_off_do_not_count(
    tmp_path_factory: pytest.TempPathFactory, cut: int, which: str
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    files, place = write_pictures(folder / "images", 7), DecodedImageStore(folder / "cache")
    decode(files, place)
    (path,) = (folder / "cache").glob(f"*/{which}")
    os.truncate(path, max(0, path.stat().st_size - cut))
    np.testing.assert_array_equal(decode(files, place).images, pixels(files))
    np.testing.assert_array_equal(decode(files[::-1], place).images, pixels(files[::-1]))


def test_pictures_of_one_content_are_decoded_once_by_many_threads(
    tmp_path: Path, place: DecodedImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = write_pictures(tmp_path / "images", 1)
    copies = [tmp_path / f"copy{number}.png" for number in range(16)]
    for copy in copies:
        copy.write_bytes(file.read_bytes())
    real, threads = store.decode_picture, list[int]()

    def slow(content: bytes | Path, rendering: PictureRendering, side: int) -> Image.Image:
        threads.append(threading.get_ident())
        time.sleep(0.05)
        return real(content, rendering, side)

    monkeypatch.setattr(store, "decode_picture", slow)
    decoded = decode(copies, replace(place, workers=8))
    assert len(threads) == 1
    assert set(decoded.places) == {0}


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_files_whose_window_misses_all_values_are_named_at_each_start(tmp_path: Path, secret: bytes | None) -> None:
    values = np.array([[0, 100], [200, 300]], np.uint16)
    contents = {
        "below.dcm": dicom(values, WindowCenter=5000, WindowWidth=100),
        "above.dcm": dicom(values, WindowCenter=-5000, WindowWidth=100),
        "within.dcm": dicom(values, WindowCenter=150, WindowWidth=300),
        "even.dcm": dicom(values * 0, WindowCenter=5000, WindowWidth=100),  # so it is in the file
        "copy.dcm": dicom(values, WindowCenter=5000, WindowWidth=100),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = [tmp_path / name for name in contents]
    for place in (DecodedImageStore(), *[DecodedImageStore(tmp_path / "cache", secret=secret)] * 2):
        decoded = decode(files, place)
        assert decoded.blank == ("below.dcm", "above.dcm", "copy.dcm")
        assert decoded.places[4] == decoded.places[0]


# ---------------------------------------------------------------------- room


def test_a_new_data_set_takes_the_place_of_the_one_used_longest_ago(tmp_path: Path) -> None:
    files, room = (
        write_pictures(tmp_path / "images", 10),
        DecodedImageStore(tmp_path / "cache", limit_bytes=10 * (64 + 81)),
    )
    for time_of_use, side in enumerate((8, 9)):
        decode(files, room, replace(FORM, size=side))
        (newest,) = (f for f in (tmp_path / "cache").glob(f"*/{IN_USE}") if f.stat().st_mtime > 1000)
        os.utime(newest, (time_of_use, time_of_use))
    gc.collect()
    decode(files, room, replace(FORM, size=7))
    assert sorted(f.stat().st_size for f in (tmp_path / "cache").glob(f"*/{PIXELS}")) == [490, 810]


def test_another_data_set_of_the_same_form_takes_the_place_of_the_first(tmp_path: Path) -> None:
    room = DecodedImageStore(tmp_path / "cache", limit_bytes=1000)
    for first in (0, 10, 0):
        files, reads = write_pictures(tmp_path / f"images{first}", 10, first=first), Reads([])
        reads.files = files
        np.testing.assert_array_equal(decode(files, room, reads=reads).images, pixels(files))
        assert reads.count == 10
        assert [f.stat().st_size for f in (tmp_path / "cache").glob(f"*/{PIXELS}")] == [640]
        gc.collect()


def test_a_data_set_that_grows_over_the_limit_with_rows_of_others_begins_anew(tmp_path: Path) -> None:
    room = DecodedImageStore(tmp_path / "cache", limit_bytes=1000)
    decode(write_pictures(tmp_path / "others", 5, first=100), room)
    decode(write_pictures(tmp_path / "images", 8), room)
    gc.collect()
    files = write_pictures(tmp_path / "images", 12)
    np.testing.assert_array_equal(decode(files, room).images, pixels(files))
    assert [f.stat().st_size for f in (tmp_path / "cache").glob(f"*/{PIXELS}")] == [12 * 64]


def test_a_data_set_that_cannot_fit_removes_no_other(tmp_path: Path) -> None:
    room = DecodedImageStore(tmp_path / "cache", limit_bytes=1000)
    files = write_pictures(tmp_path / "images", 5)
    for side in (8, 9):
        decode(files, room, replace(FORM, size=side))
    gc.collect()
    with pytest.raises(BadInput, match=r"simulation\.image_cache_gb = 0"):
        decode(write_pictures(tmp_path / "many", 20), room)
    assert sorted(f.stat().st_size for f in (tmp_path / "cache").glob(f"*/{PIXELS}")) == [320, 405]


def test_the_share_of_the_disk_that_stays_free_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SPARE_BYTES", 1 << 60)
    with pytest.raises(BadInput, match=r"of which .* stay free.* simulation\.image_cache_gb = 0"):
        decode(write_pictures(tmp_path / "images", 3), DecodedImageStore(tmp_path / "cache"))


def test_pictures_in_use_stay(tmp_path: Path) -> None:
    files, room = write_pictures(tmp_path / "images", 10), DecodedImageStore(tmp_path / "cache", limit_bytes=700)
    used = decode(files, room)
    with pytest.raises(BadInput, match="has room for 60 B"):
        decode(files, room, replace(FORM, size=9))
    np.testing.assert_array_equal(used.images, pixels(files))


def test_the_key_of_a_limit_that_is_too_small_is_named(tmp_path: Path) -> None:
    files = write_pictures(tmp_path / "images", 10)
    with pytest.raises(BadInput, match=r"10 images take 640 B .*at most|may take 600 B \(simulation\.image_cache_gb\)"):
        decode(files, DecodedImageStore(tmp_path / "cache", limit_bytes=600))


def test_without_a_folder_too_many_images_are_refused_before_the_first_is_decoded(tmp_path: Path) -> None:
    reads = Reads([])
    with pytest.raises(BadInput, match=r"10,000,000 images take 160 TB .*simulation\.image_cache_gb"):
        decode_pictures(["a"] * 10**7, reads, replace(FORM, size=4000), DecodedImageStore())
    assert reads.count == 0


def test_a_folder_that_cannot_be_used_is_said_and_does_without(tmp_path: Path) -> None:
    files, lines = write_pictures(tmp_path / "images", 3), list[str]()
    (tmp_path / "cache").write_text("a file")
    decoded = decode(files, DecodedImageStore(tmp_path / "cache" / "images", tell=lines.append))
    np.testing.assert_array_equal(decoded.images, pixels(files))
    assert "images are decoded at each start" in lines[0]


def write_users_folder(folder: Path) -> None:
    (folder / "scans" / "2024").mkdir(parents=True)
    (folder / "scans" / PIXELS).write_bytes(bytes(10_000))
    (folder / "scans" / "2024" / "a.dcm").write_text("irreplaceable")
    (folder / "notes.txt").write_text("mine")
    folder.chmod(0o2775)


def test_a_folder_that_holds_other_things_gets_a_folder_inside_and_stays_as_it_is(tmp_path: Path) -> None:
    files, folder = write_pictures(tmp_path / "images", 10), tmp_path / "home"
    write_users_folder(folder)
    room = DecodedImageStore(folder, limit_bytes=1000)
    for side in (8, 9, 10):
        form = replace(FORM, size=side)
        np.testing.assert_array_equal(decode(files, room, form).images, pixels(files, form))
        gc.collect()
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "polyclinic-images", "scans"]
    assert sorted(path.name for path in (folder / "scans").rglob("*")) == ["2024", "a.dcm", PIXELS]
    assert folder.stat().st_mode & 0o7777 == 0o2775
    assert [f.stat().st_size for f in (folder / "polyclinic-images").glob(f"*/{PIXELS}")] == [1000]


def test_an_empty_folder_is_used_with_the_rights_it_has(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o2775)
    decode(write_pictures(tmp_path / "images", 3), DecodedImageStore(tmp_path / "cache"))
    assert (tmp_path / "cache").stat().st_mode & 0o7777 == 0o2775
    assert len(list((tmp_path / "cache").glob(f"*/{PIXELS}"))) == 1


def test_a_folder_that_somebody_put_into_the_cache_stays(tmp_path: Path) -> None:
    files, room = write_pictures(tmp_path / "images", 10), DecodedImageStore(tmp_path / "cache", limit_bytes=1000)
    decode(files, room)
    write_users_folder(tmp_path / "cache" / "thesis")
    gc.collect()
    decode(files, room, replace(FORM, size=10))
    assert (tmp_path / "cache" / "thesis" / "scans" / "2024" / "a.dcm").read_text() == "irreplaceable"


def test_another_cache_inside_a_cache_stays(tmp_path: Path) -> None:
    files, room = write_pictures(tmp_path / "images", 10), DecodedImageStore(tmp_path / "cache", limit_bytes=1000)
    team = tmp_path / "cache" / "team"
    for root in (room, replace(room, folder=team)):
        decode(files, root)
    (team / "notes.txt").write_text("mine")
    gc.collect()
    decode(files, room, replace(FORM, size=10))
    assert (team / "notes.txt").read_text() == "mine"
    assert [f.stat().st_size for f in team.glob(f"*/{PIXELS}")] == [640]
    assert store.remove_image_store(tmp_path / "cache")
    assert len(list(team.glob(f"*/{PIXELS}"))) == 1


def test_a_file_that_somebody_put_beside_the_pixels_stays(tmp_path: Path) -> None:
    files, room = write_pictures(tmp_path / "images", 10), DecodedImageStore(tmp_path / "cache", limit_bytes=1000)
    decode(files, room)
    ((tmp_path / "cache").glob(f"*/{PIXELS}").__next__().parent / "notes.txt").write_text("mine")
    gc.collect()
    decode(files, room, replace(FORM, size=10))
    assert [f.stat().st_size for f in (tmp_path / "cache").glob(f"*/{PIXELS}")] == [1000]
    assert len(list((tmp_path / "cache").glob("*/notes.txt"))) == 1
    np.testing.assert_array_equal(decode(files, DecodedImageStore(tmp_path / "cache")).images, pixels(files))


def test_only_decoded_images_are_removed_from_a_folder_that_holds_other_things(tmp_path: Path) -> None:
    folder = tmp_path / "images-plain"
    write_users_folder(folder)
    before = sorted(folder.rglob("*"))
    assert not store.remove_image_store(folder)
    decode(write_pictures(tmp_path / "images", 3), DecodedImageStore(folder))
    assert list(folder.rglob(PIXELS)) != [folder / "scans" / PIXELS]
    gc.collect()
    assert store.remove_image_store(folder)
    assert sorted(folder.rglob("*")) == before
    assert not store.remove_image_store(tmp_path / "nothing")


def test_a_lock_that_failed_is_no_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(OSError, match="file"):
        CacheFolderLock(tmp_path / "file" / "cache")
    gc.collect()  # an error in __del__ would be a warning, and fail the test


@pytest.mark.parametrize("changed", ["st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"])
def test_a_file_is_another_one_if_its_place_on_the_disk_its_size_or_a_time_differs(
    monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    facts = dict.fromkeys(("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns", "st_ctime"), 1)
    identities = []
    for status in (facts, facts, facts | {changed: 2}):
        monkeypatch.setattr(Path, "stat", lambda path, status=status: SimpleNamespace(**status))
        identities.append(FileIdentity.from_path(Path("/image.png")))
    assert identities[0] == identities[1] != identities[2]


def test_few_files_leave_nothing_on_the_disk(
    tmp_path: Path, place: DecodedImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SMALL_BYTES", 1 << 20)
    decode(write_pictures(tmp_path / "images", 3), place)
    assert not (tmp_path / "cache").exists()


def test_progress_says_count_rate_and_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = iter([0.0, *np.arange(1.0, 11.0).tolist()]), list[str]()
    monkeypatch.setattr(store.time, "monotonic", lambda: next(clock))
    progress = DecodingProgress(10, lines.append)
    for _ in range(10):
        progress.count_decoded_picture()
    assert lines == ["decoding images: 5 of 10, 1 a second, 5.0 s left"]
