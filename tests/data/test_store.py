"""Decoded pictures in a cache: the pixels of the decoder, decoded once, also after kills and beside other programs."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from polyclinic.common.errors import BadInput
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images import store
from polyclinic.data.images.pixel_cache import (
    IN_USE_FILE,
    PIXELS_FILE,
    ROWS_FILE,
    CacheFolderLock,
    MemoryMappedPictures,
)
from polyclinic.data.images.pixels import load_pixels_on_device
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.images.store import (
    DecodedImageStore,
    DecodedPictures,
    DecodingProgress,
    FileIdentity,
    decode_pictures,
)
from tests.data.dicom_files import dicom

FORM = DecodedImageFormat(8, color=False, resize="pad")
ROOT = Path(__file__).parents[2]
CACHE = DecodedImageStore(Path("cache"))
SECRETS = pytest.mark.parametrize("place", [CACHE, replace(CACHE, secret=bytes(range(32)))], ids=["plain", "encrypted"])


@pytest.fixture(autouse=True)
def every_set_is_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work in a folder of the test's own, where also small sets are cached at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "CACHE_THRESHOLD_BYTES", 0)
    monkeypatch.setattr(store, "MIN_FILE_AGE_S", 0.0)


def write_pictures(count: int, *, color: bool = False, first: int = 0, folder: Path = Path("images")) -> list[Path]:
    """Write pictures that all differ."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"{number}.png" for number in range(first, first + count)]
    for number, file in enumerate(files, start=first):
        shape = (9, 7, 3) if color else (9, 7)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, shape, np.uint8)).save(file, format="PNG")
    return files


def decode(
    files: Sequence[Path],
    place: DecodedImageStore = CACHE,
    form: DecodedImageFormat = FORM,
    reads: list[int] | None = None,
) -> DecodedPictures:
    """Decode the files, and note the rows that are read."""

    def read(row: int) -> Path:
        if reads is not None:
            reads.append(row)
        return files[row]

    identities = [FileIdentity.identify_file(file) for file in files]
    return decode_pictures([file.name for file in files], read, form, place, identify=identities.__getitem__)


def pixels(files: Sequence[Path], form: DecodedImageFormat = FORM) -> NDArray[np.uint8]:
    return decode(files, DecodedImageStore(), form).images


def read_rows(files: Sequence[Path], place: DecodedImageStore = CACHE, form: DecodedImageFormat = FORM) -> list[int]:
    """Return the rows that are read to decode the files, whose pixels are those of the decoder."""
    reads = list[int]()
    np.testing.assert_array_equal(decode(files, place, form, reads).images, pixels(files, form))
    gc.collect()
    return sorted(reads)


def stored(name: str = PIXELS_FILE, folder: Path = Path("cache")) -> Path:
    (path,) = folder.glob(f"*/{name}")
    return path


def sizes(folder: Path = Path("cache")) -> list[int]:
    """Return the bytes of each data set in the cache."""
    return sorted(file.stat().st_size for file in folder.glob(f"*/{PIXELS_FILE}"))


def flip_bit(place: int) -> None:
    content = bytearray(stored().read_bytes())
    content[place] ^= 16
    stored().write_bytes(content)


@SECRETS
@pytest.mark.parametrize("color", [False, True])
def test_a_cache_gives_the_pixels_of_the_decoder(place: DecodedImageStore, color: bool) -> None:
    files = write_pictures(20, color=color)
    files.insert(3, Path("images", "torn.png"))
    files[3].write_bytes(files[0].read_bytes()[:60])
    form = replace(FORM, color=color)
    plain = decode(files, DecodedImageStore(), form)
    for _ in range(2):
        decoded = decode(files, place, form)
        np.testing.assert_array_equal(decoded.images, plain.images)
        assert decoded.rows.tolist() == plain.rows.tolist() == [*range(3), *range(4, 21)]
        assert decoded.skipped == plain.skipped


def test_a_file_is_read_again_only_if_it_or_the_decoder_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_pictures(10)
    assert read_rows(files) == [*range(10)]
    assert read_rows(files) == []
    assert isinstance(decode(files).stored, MemoryMappedPictures)
    files += write_pictures(2, first=10)
    Image.fromarray(np.full((9, 7), 77, np.uint8)).save(files[4])
    assert read_rows(files) == [4, 10, 11]
    monkeypatch.setattr(store, "_list_decoder_versions", lambda: {"pillow": "another"})
    assert read_rows(files) == [*range(12)]


def test_a_file_that_has_just_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # It may change once more without another time of change, as in Git's "racy" index.
    monkeypatch.setattr(store, "MIN_FILE_AGE_S", 60.0)
    files = write_pictures(3)
    assert [read_rows(files) for _ in range(2)] == [[0, 1, 2]] * 2


def test_a_copy_and_a_new_name_are_read_but_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_pictures(6)
    expected = pixels(files)
    decode(files)
    Path("moved").mkdir()
    moved = [file.rename(Path("moved", f"x{file.name}")) for file in files]
    Path("copy.png").write_bytes(moved[2].read_bytes())
    monkeypatch.setattr(store, "decode_picture", None)  # would raise, and leave the picture out
    decoded = decode([*moved, Path("copy.png")])
    np.testing.assert_array_equal(decoded.images, np.concatenate([expected, expected[2:3]]))


OTHER_FORMS = {
    "size": replace(FORM, size=9),
    "color": replace(FORM, color=True),
    "resize": replace(FORM, resize="stretch"),
    "window": replace(FORM, rendering=PictureRenderingOptions(window=(40.0, 80.0))),
    "frame": replace(FORM, rendering=PictureRenderingOptions(frame=1)),
}


@pytest.mark.parametrize("form", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_another_form_is_decoded_by_itself(form: DecodedImageFormat) -> None:
    files = write_pictures(4)
    assert [read_rows(files), read_rows(files, form=form), read_rows(files)] == [[*range(4)], [*range(4)], []]


def test_encrypted_pictures_show_nothing_and_open_with_their_key_alone() -> None:
    file = Path("flat.png")
    Image.fromarray(np.full((8, 8), 200, np.uint8)).save(file)
    decode([file], replace(CACHE, secret=bytes(range(32))))
    assert bytes([200] * 8) not in stored().read_bytes()
    assert decode([file], replace(CACHE, secret=bytes(32))).images.tolist() == [[[200] * 8] * 8]
    assert len(sizes()) == 2


@SECRETS
def test_a_row_that_was_changed_is_refused(place: DecodedImageStore) -> None:
    files, place = write_pictures(3), replace(place, workers=1)
    decode(files, place)
    flip_bit(stored().stat().st_size // 3 + 6)
    decoded = decode(files, place)
    np.testing.assert_array_equal(decoded.stored[np.array([0, 2])], pixels(files)[[0, 2]])
    with pytest.raises(BadInput, match="not what was written"):
        decoded.stored[np.array([0, 1])]


@pytest.mark.parametrize("row", [0, 57, 99])
def test_pictures_that_are_copied_to_a_gpu_are_checked_before(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    files = write_pictures(100)
    assert load_pixels_on_device(image_set_of(decode(files)), "meta").stored.shape == (100, 1, 8, 8)
    flip_bit(row * 64 + 3)
    with pytest.raises(BadInput, match="not what was written"):
        load_pixels_on_device(image_set_of(decode(files)), "meta")


EXCHANGES = {"exchanged": [0, 1, 5, 3, 4, 2, *range(6, 40)], "repeated": [0, 1, 2, 3, 4, 2, *range(6, 40)]}


@pytest.mark.parametrize("order", EXCHANGES.values(), ids=EXCHANGES)
@pytest.mark.parametrize("name", [PIXELS_FILE, ROWS_FILE])
@SECRETS
def test_rows_and_records_exchanged_are_refused(place: DecodedImageStore, name: str, order: list[int]) -> None:
    files, place = write_pictures(40), replace(place, workers=1)
    decode(files, place)
    stored(name).write_bytes(np.frombuffer(stored(name).read_bytes(), np.uint8).reshape(40, -1)[order].tobytes())
    with pytest.raises(BadInput, match="not what was written"):
        _ = decode(files, place).images


@pytest.mark.parametrize("color", [False, True])
@SECRETS
def test_batches_from_the_disk_are_those_from_memory(place: DecodedImageStore, color: bool) -> None:
    files, form = write_pictures(23, color=color), replace(FORM, color=color)
    held, kept = (image_set_of(decode(files, each, form)) for each in (DecodedImageStore(), place))
    parts = list(torch.split(torch.randperm(23, generator=torch.Generator().manual_seed(0)), 4))
    for chosen in (np.arange(23), np.array([5, 2, 2, 9])):
        memory, disk = (load_pixels_on_device(images.select_rows(chosen), "cpu") for images in (held, kept))
        rows = [part[part < len(chosen)] for part in parts if (part < len(chosen)).any()]
        for expected, batch in zip(memory.prefetch_batches(rows), disk.prefetch_batches(rows), strict=True):
            assert torch.equal(expected, batch)
            assert expected.stride() == batch.stride()
        for expected, batch in zip(memory.iterate_batches(4), disk.iterate_batches(4), strict=True):
            assert torch.equal(expected, batch)
    nothing = load_pixels_on_device(kept.select_rows(np.arange(0)), "cpu")
    assert [len(batch) for batch in nothing.iterate_batches(4)] == [0]


def image_set_of(decoded: DecodedPictures) -> ImageSet:
    count = len(decoded.places)
    labels, names = np.zeros((count, 1), np.float32), np.full(count, "")
    return ImageSet(decoded.stored, labels, ("a",), names, names, places=decoded.places)


def test_a_reader_that_is_left_early_ends_its_thread() -> None:
    kept = load_pixels_on_device(image_set_of(decode(write_pictures(9))), "cpu")
    before = threading.active_count()
    batches = kept.iterate_batches(1)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.long)])
def test_a_run_ends_in_the_same_model_with_and_without_the_cache(backend: str) -> None:
    files = write_pictures(40)
    lines = [f"{file.name},p{number // 2},{number % 2},{number // 3 % 2}" for number, file in enumerate(files)]
    Path("labels.csv").write_text("\n".join(["image,patient,a,b", *lines]))
    columns = {"image_column": "image", "patient_column": "patient", "label_columns": ["a", "b"]}
    files_of = {"images": str(Path("images").resolve()), "labels": str(Path("labels.csv").resolve())}
    tree = {
        "run": {"method": "surgical", "rounds": 1},
        "model": {"architecture": "tiny_cnn", "channels": 1, "image_size": 16},
        "data": {"kind": "folder", **files_of, "image_size": 16, **columns},
        "partition": {"kind": "class_lists", "lists": {"east": ["a", "b"], "north": ["b"]}},
        "simulation": {"backend": "inline"},
    }
    cache = {"simulation.image_cache": str(Path("cache").resolve()), "simulation.backend": backend}
    plain = pc.simulate(tree, settings={"simulation.image_cache_gb": 0}, out=Path("plain"))
    hashes = [pc.simulate(tree, settings=cache, out=Path(name)).model_sha256 for name in ("first", "second")]
    assert hashes == [plain.model_sha256] * 2
    assert sizes()


# ---------------------------------------------------------------------- kills and other programs

DECODE = """
import sys, time
from pathlib import Path
from polyclinic.data.images import pixel_cache, store
from polyclinic.data.images.reading import DecodedImageFormat
store.CACHE_THRESHOLD_BYTES, store.MIN_FILE_AGE_S, pixel_cache.FLUSH_INTERVAL_S = 0, 0.0, 0.05
files, count = sorted(Path(sys.argv[1]).iterdir()), 0
def read(row):
    global count
    count += 1
    time.sleep(float(sys.argv[3]))
    return files[row]
place = store.DecodedImageStore(Path(sys.argv[2]), workers=2)
identities = [store.FileIdentity.identify_file(file) for file in files]
form = DecodedImageFormat(8, color=False, resize="pad")
names = [file.name for file in files]
decoded = store.decode_pictures(names, read, form, place, identify=identities.__getitem__)
print(count, int(decoded.images.astype(int).sum()), flush=True)
"""
"""Without torch, whose import takes seconds."""


@contextmanager
def decoding(pause_s: float) -> Iterator["subprocess.Popen[str]"]:
    """Decode the images in another program, which ends at the latest with the block."""
    folders = [str(Path(name).resolve()) for name in ("images", "cache")]
    command = [sys.executable, "-c", DECODE, *folders, str(pause_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield process


def kept_bytes() -> int:
    return sum(path.stat().st_size for path in Path("cache").glob(f"*/{ROWS_FILE}"))


def test_a_killed_program_leaves_whole_pictures_that_are_not_decoded_again() -> None:
    files = sorted(write_pictures(200))
    for _ in range(2):
        before = kept_bytes()
        with decoding(0.1) as process:
            while kept_bytes() == before:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
    assert 0 < len(read_rows(files)) < 200


def test_two_programs_at_once_decode_each_picture_once() -> None:
    files = sorted(write_pictures(40))
    with decoding(0.01) as first, decoding(0.01) as second:
        counts, sums = zip(*(map(int, each.communicate()[0].split()) for each in (first, second)), strict=True)
    assert sum(counts) == 40
    assert sums == (int(pixels(files).astype(int).sum()),) * 2


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, 400), which=st.sampled_from([ROWS_FILE, "files", PIXELS_FILE]))
def test_records_that_a_crash_cut_do_not_count(tmp_path_factory: pytest.TempPathFactory, cut: int, which: str) -> None:
    folder = tmp_path_factory.mktemp("cut")
    files, place = write_pictures(7, folder=folder / "images"), DecodedImageStore(folder / "cache")
    decode(files, place)
    path = stored(which, folder / "cache")
    os.truncate(path, max(0, path.stat().st_size - cut))
    np.testing.assert_array_equal(decode(files, place).images, pixels(files))
    np.testing.assert_array_equal(decode(files[::-1], place).images, pixels(files[::-1]))


def test_pictures_of_one_content_are_decoded_once_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = write_pictures(1)
    copies = [Path(f"copy{number}.png") for number in range(16)]
    for copy in copies:
        copy.write_bytes(file.read_bytes())
    real, threads = store.decode_picture, list[int]()

    def slow(content: bytes | Path, rendering: PictureRenderingOptions, side: int) -> Image.Image:
        threads.append(threading.get_ident())
        time.sleep(0.05)
        return real(content, rendering, side)

    monkeypatch.setattr(store, "decode_picture", slow)
    decoded = decode(copies, replace(CACHE, workers=8))
    assert len(threads) == 1
    assert set(decoded.places) == {0}


@SECRETS
def test_files_whose_window_misses_all_values_are_named_at_each_start(place: DecodedImageStore) -> None:
    values = np.array([[0, 100], [200, 300]], np.uint16)
    contents = {
        "below.dcm": dicom(values, WindowCenter=5000, WindowWidth=100),
        "above.dcm": dicom(values, WindowCenter=-5000, WindowWidth=100),
        "within.dcm": dicom(values, WindowCenter=150, WindowWidth=300),
        "even.dcm": dicom(values * 0, WindowCenter=5000, WindowWidth=100),  # so it is in the file
        "copy.dcm": dicom(values, WindowCenter=5000, WindowWidth=100),
    }
    for name, content in contents.items():
        Path(name).write_bytes(content)
    for each in (DecodedImageStore(), place, place):
        decoded = decode([Path(name) for name in contents], each)
        assert decoded.blank == ("below.dcm", "above.dcm", "copy.dcm")
        assert decoded.places[4] == decoded.places[0]


# ---------------------------------------------------------------------- room

SMALL = replace(CACHE, limit_bytes=1000)
"""A cache with room for 15 pictures of 8 x 8."""


def test_a_new_data_set_takes_the_place_of_the_one_used_longest_ago() -> None:
    files, room = write_pictures(10), replace(CACHE, limit_bytes=10 * (64 + 81))
    for time_of_use, side in enumerate((8, 9)):
        decode(files, room, replace(FORM, size=side))
        (newest,) = (file for file in Path("cache").glob(f"*/{IN_USE_FILE}") if file.stat().st_mtime > 1000)
        os.utime(newest, (time_of_use, time_of_use))
    gc.collect()
    decode(files, room, replace(FORM, size=7))
    assert sizes() == [490, 810]


def test_another_data_set_of_the_same_form_takes_the_place_of_the_first() -> None:
    for first in (0, 10, 0):
        assert read_rows(write_pictures(10, first=first, folder=Path(f"images{first}")), SMALL) == [*range(10)]
        assert sizes() == [640]


def test_a_data_set_that_grows_over_the_limit_with_rows_of_others_begins_anew() -> None:
    read_rows(write_pictures(5, first=100), SMALL)
    read_rows(write_pictures(8), SMALL)
    read_rows(write_pictures(12), SMALL)
    assert sizes() == [12 * 64]


def test_a_data_set_that_cannot_fit_removes_no_other() -> None:
    files = write_pictures(5)
    for side in (8, 9):
        decode(files, SMALL, replace(FORM, size=side))
    gc.collect()
    with pytest.raises(BadInput, match=r"simulation\.image_cache_gb = 0"):
        decode(write_pictures(20), SMALL)
    assert sizes() == [320, 405]


def test_pictures_in_use_stay() -> None:
    files, room = write_pictures(10), replace(CACHE, limit_bytes=700)
    used = decode(files, room)
    with pytest.raises(BadInput, match="has room for 60 B"):
        decode(files, room, replace(FORM, size=9))
    np.testing.assert_array_equal(used.images, pixels(files))


def test_the_limit_and_the_share_of_the_disk_that_stays_free_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_pictures(10)
    with pytest.raises(BadInput, match=r"10 images take 640 B .*at most|may take 600 B \(simulation\.image_cache_gb\)"):
        decode(files, replace(CACHE, limit_bytes=600))
    monkeypatch.setattr(store, "RESERVED_DISK_BYTES", 1 << 60)
    with pytest.raises(BadInput, match=r"of which .* stay free.* simulation\.image_cache_gb = 0"):
        decode(files)


def test_without_a_folder_too_many_images_are_refused_before_the_first_is_decoded() -> None:
    with pytest.raises(BadInput, match=r"1,000,000 images take 16\.0 TB .*simulation\.image_cache_gb"):
        decode_pictures(["a"] * 10**6, [].__getitem__, replace(FORM, size=4000), DecodedImageStore())


def test_a_folder_that_cannot_be_used_is_said_and_does_without() -> None:
    files, lines = write_pictures(3), list[str]()
    Path("cache").write_text("a file")
    assert read_rows(files, DecodedImageStore(Path("cache", "images"), tell=lines.append)) == [0, 1, 2]
    assert "images are decoded at each start" in lines[0]


def write_users_folder(folder: Path) -> None:
    (folder / "scans" / "2024").mkdir(parents=True)
    (folder / "scans" / PIXELS_FILE).write_bytes(bytes(10_000))
    (folder / "scans" / "2024" / "a.dcm").write_text("irreplaceable")
    (folder / "notes.txt").write_text("mine")
    folder.chmod(0o2775)


def test_a_folder_that_holds_other_things_gets_a_folder_inside_and_stays_as_it_is() -> None:
    files, folder = write_pictures(10), Path("home")
    write_users_folder(folder)
    before = sorted(folder.rglob("*"))
    assert not store.remove_image_store(folder)
    for side in (8, 9, 10):
        read_rows(files, DecodedImageStore(folder, limit_bytes=1000), replace(FORM, size=side))
    inside = folder / "polyclinic-images"
    assert sorted(path for path in folder.rglob("*") if inside not in (path, *path.parents)) == before
    assert folder.stat().st_mode & 0o7777 == 0o2775
    assert sizes(inside) == [1000]
    assert store.remove_image_store(folder)
    assert sorted(folder.rglob("*")) == before
    assert not store.remove_image_store(Path("nothing"))


def test_an_empty_folder_is_used_with_the_rights_it_has() -> None:
    Path("cache").mkdir()
    Path("cache").chmod(0o2775)
    decode(write_pictures(3))
    assert Path("cache").stat().st_mode & 0o7777 == 0o2775
    assert len(sizes()) == 1


def test_a_folder_and_a_file_that_somebody_put_into_the_cache_stay() -> None:
    files = write_pictures(10)
    read_rows(files, SMALL)
    write_users_folder(Path("cache", "thesis"))
    (stored().parent / "notes.txt").write_text("mine")
    read_rows(files, SMALL, replace(FORM, size=10))
    assert Path("cache", "thesis", "scans", "2024", "a.dcm").read_text() == "irreplaceable"
    assert sizes() == [1000]
    assert len([path for path in Path("cache").glob("*/notes.txt") if path.parent.name != "thesis"]) == 1
    assert read_rows(files) == [*range(10)]


def test_another_cache_inside_a_cache_stays() -> None:
    files, team = write_pictures(10), Path("cache", "team")
    for place in (SMALL, replace(SMALL, folder=team)):
        read_rows(files, place)
    (team / "notes.txt").write_text("mine")
    decode(files, SMALL, replace(FORM, size=10))
    gc.collect()
    assert (team / "notes.txt").read_text() == "mine"
    assert sizes(team) == [640]
    assert store.remove_image_store(Path("cache"))
    assert len(sizes(team)) == 1


def test_a_lock_that_failed_is_no_error_of_its_own() -> None:
    Path("file").write_text("a file")
    with pytest.raises(OSError, match="file"):
        CacheFolderLock(Path("file", "cache"))
    gc.collect()  # an error in __del__ would be a warning, and fail the test


@pytest.mark.parametrize("changed", ["st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"])
def test_a_file_is_another_one_if_its_place_size_or_times_differ(monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    facts = dict.fromkeys(("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns", "st_ctime", "st_mode"), 1)
    identities = []
    for status in (facts, facts, facts | {changed: 2}):
        monkeypatch.setattr(Path, "stat", lambda path, status=status: SimpleNamespace(**status))
        identities.append(FileIdentity.identify_file(Path("/image.png")))
    assert identities[0] == identities[1] != identities[2]


def test_few_files_leave_nothing_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CACHE_THRESHOLD_BYTES", 1 << 20)
    decode(write_pictures(3))
    assert not Path("cache").exists()


def test_progress_says_count_rate_and_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = iter([0.0, *np.arange(1.0, 11.0).tolist()]), list[str]()
    monkeypatch.setattr(store.time, "monotonic", lambda: next(clock))
    progress = DecodingProgress(10, lines.append)
    for _ in range(10):
        progress.count_decoded_picture()
    assert lines == ["decoding images: 5 of 10, 1 a second, 5.0 s left"]
