"""Pictures and videos as files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, ImageSequence, PngImagePlugin

from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import read_regular

FRAME_PIXELS, FILE_PIXELS = 2**26, 2**28
"""Of a picture to be decoded: 8192 x 8192, and 291 frames of 1280 x 720; 768 MB in all."""
_FILE_BYTES = 2**30


def encode_picture(picture: NDArray[np.uint8], about: Mapping[str, object]) -> bytes:
    """[height, width, 3] as PNG, with ``about`` as text."""
    notes = PngImagePlugin.PngInfo()
    for key, value in about.items():
        notes.add_itxt(key, str(value))
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", pnginfo=notes)
    return buffer.getvalue()


def encode_video(frames: NDArray[np.uint8], about: Mapping[str, object], fps: float) -> bytes:
    """[frames, height, width, 3] as MP4 (H.264), with ``about`` as its comment, in JSON.

    Odd sides lose one pixel, which the format cannot hold.

    Raises:
        StoreError: PyAV is not installed.
    """
    try:
        import av
    except ModuleNotFoundError as error:
        raise StoreError(
            "an MP4 cannot be written without PyAV: pip install 'spotlight-rewards[video]'"
        ) from error
    height, width = (side - side % 2 for side in frames.shape[1:3])
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        file.metadata["comment"] = json.dumps(dict(about))
        stream = file.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": "17"}
        for frame in frames:
            pixels = np.ascontiguousarray(frame[:height, :width])
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


def open_picture(source: Path | IO[bytes], formats: tuple[str, ...] | None = None) -> Image.Image:
    """Open a picture that anybody may have made, decoding nothing yet.

    Raises:
        OSError: no file, no picture, or one of more than ``FRAME_PIXELS`` a frame or ``FILE_PIXELS`` in all,
            or of more than 8 bits, whose shades would all become white.
    """
    if isinstance(source, Path):
        source = io.BytesIO(read_regular(source, _FILE_BYTES))
    with decoding():
        image = Image.open(source, formats=formats)
        frames = getattr(image, "n_frames", 1)
    if image.width * image.height > FRAME_PIXELS or frames * image.width * image.height > FILE_PIXELS:
        image.close()
        raise OSError(
            f"{frames} frame(s) of {image.width} x {image.height} pixels; expected at most {FRAME_PIXELS:,} "
            f"pixels a frame and {FILE_PIXELS:,} in all: save it smaller"
        )
    _require_8_bits(image)
    return image


def read_upright(path: Path) -> Image.Image:
    """A picture, of several frames the first, as RGB, turned as its EXIF data say. Raises OSError."""
    with open_picture(path) as image, decoding():
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def decoding() -> Iterator[None]:
    """Of whatever Pillow raises of damaged or hostile files, an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"no picture that can be shown ({error})") from error


def _require_8_bits(image: Image.Image) -> None:
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise OSError(f"its numbers have more than 8 bits (mode {image.mode}); save it with 8")


def read_media(path: Path) -> tuple[NDArray[np.uint8], dict[str, object]]:
    """A picture [height, width, 3] or a video [frames, ...], and what is written about it.

    Args:
        path: any picture that Pillow reads, animated ones included, or an MP4. Turned as its EXIF data or its
            display matrix say; what is transparent is white.

    Raises:
        StoreError: the file cannot be read, or is an MP4 and PyAV is not installed.
    """
    try:
        return _read_video(path) if path.suffix.lower() == ".mp4" else _read_picture(path)
    except ModuleNotFoundError as error:
        remedy = "pip install 'spotlight-rewards[video]'"
        raise StoreError(f"{path} cannot be read without PyAV: {remedy}") from error
    except Exception as error:
        raise StoreError(
            f"{path} cannot be read ({type(error).__name__}: {error}); expected a picture, or a video as MP4"
        ) from error


def _read_picture(path: Path) -> tuple[NDArray[np.uint8], dict[str, object]]:
    with open_picture(path) as image:
        about: dict[str, object] = {str(key): value for key, value in image.info.items()}
        # Cameras put a preview, or how bright to show it, behind a photograph.
        shown = [image] if image.format == "MPO" else ImageSequence.Iterator(image)
        frames = np.stack([_as_seen(each) for each in shown])
    return frames if len(frames) > 1 else frames[0], about


def _as_seen(image: Image.Image) -> NDArray[np.uint8]:
    _require_8_bits(image)
    upright = ImageOps.exif_transpose(image)
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        # What is below transparent pixels could be anything.
        below = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(below, upright.convert("RGBA"))
    return np.asarray(upright.convert("RGB"))


def _read_video(path: Path) -> tuple[NDArray[np.uint8], dict[str, object]]:
    import av

    frames: list[NDArray[np.uint8]] = []
    with av.open(str(path)) as file:
        for frame in file.decode(video=0):
            if (len(frames) + 1) * frame.width * frame.height > FILE_PIXELS:
                raise ValueError(f"more than {FILE_PIXELS:,} pixels: cut it, or save it smaller")
            # As viewers turn what a telephone filmed upright: counter-clockwise by so many degrees.
            frames.append(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90)))
        comment = file.metadata.get("comment", "")
    try:
        about = json.loads(comment)
    except ValueError:
        about = {}
    return np.stack(frames), about if isinstance(about, dict) else {}
