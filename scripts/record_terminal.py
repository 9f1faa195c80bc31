"""Record a command's terminal as an animated GIF: `python scripts/record_terminal.py OUT.gif -- make demo`.

This makes the picture in the README. It needs `pip install pyte pillow matplotlib`; the font comes with matplotlib.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import pyte
from PIL import Image, ImageDraw, ImageFont

_FONT_SIZE: Final = 15
_CELL: Final = (9, 18)  # of a character, in pixels
_MARGIN: Final = 12
_BACKGROUND: Final = "#0d1117"
_COLORS: Final = {"default": "#e6edf3", "green": "#3fb950", "red": "#ff7b72", "yellow": "#d29922", "cyan": "#39c5cf"}
_LAST_FRAME_SECONDS: Final = 6.0


def record(command: list[str], *, columns: int, lines: int, frame_seconds: float) -> list[tuple[list[Any], float]]:
    """Run a command in a terminal; return its screens as `(lines of characters, seconds)`, one for each change."""
    screen = pyte.Screen(columns, lines)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.execvp(command[0], command)  # noqa: S606  (runs the command to record)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    frames: list[tuple[list[Any], float]] = []
    shown_at = time.monotonic()

    def take() -> None:
        nonlocal shown_at
        now = time.monotonic()
        rows = [[(cell.data, cell.fg) for cell in (screen.buffer[y][x] for x in range(columns))] for y in range(lines)]
        if not frames or rows != frames[-1][0]:
            frames.append((rows, 0.0))
        frames[-1] = frames[-1][0], frames[-1][1] + now - shown_at
        shown_at = now

    while True:
        if select.select([terminal], [], [], frame_seconds)[0]:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:  # the command has ended
                data = b""
            if not data:
                break
            stream.feed(data)
        if time.monotonic() - shown_at >= frame_seconds:
            take()
    take()
    os.waitpid(child, 0)
    return frames


def write_gif(path: Path, frames: list[tuple[list[Any], float]], *, speed: float) -> None:
    """Draw the frames and play them `speed` times as fast as recorded."""
    font_file = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"
    font = ImageFont.truetype(str(font_file), _FONT_SIZE)
    lines = max(y for rows, _ in frames for y, row in enumerate(rows, 1) if any(data.strip() for data, _ in row))
    size = len(frames[0][0][0]) * _CELL[0] + 2 * _MARGIN, lines * _CELL[1] + 2 * _MARGIN
    images = []
    for rows, _ in frames:
        image = Image.new("RGB", size, _BACKGROUND)
        draw = ImageDraw.Draw(image)
        for y, row in enumerate(rows[:lines]):
            for x, (data, color) in enumerate(row):
                if data.strip():
                    at = _MARGIN + x * _CELL[0], _MARGIN + y * _CELL[1]
                    draw.text(at, data, font=font, fill=_COLORS.get(color, _COLORS["default"]))
        images.append(image.quantize(16))
    seconds = [each / speed for _, each in frames[:-1]] + [_LAST_FRAME_SECONDS]
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=[round(1000 * each) for each in seconds], loop=0,
        optimize=True,
    )  # fmt: skip


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(description="Record a command's terminal as an animated GIF.")
    parser.add_argument("output", type=Path, help="the GIF")
    parser.add_argument("--columns", type=int, default=110, help="width of the terminal")
    parser.add_argument("--lines", type=int, default=40, help="height of the terminal")
    parser.add_argument("--frame-seconds", type=float, default=1.5, help="minimum seconds between two frames")
    parser.add_argument("--speed", type=float, default=4.0, help="playback speed relative to the recording")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    given = parser.parse_args()
    frames = record(given.command, columns=given.columns, lines=given.lines, frame_seconds=given.frame_seconds)
    write_gif(given.output, frames, speed=given.speed)
    sys.stdout.write(f"{given.output}: {len(frames)} frames, {given.output.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
