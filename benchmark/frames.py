"""A strip of frames from a video, to show an episode in one picture.

python benchmark/frames.py runs/.../videos/evaluate-episode-0.mp4 docs/push_frames.png
"""

from dataclasses import dataclass

import numpy as np
import tyro
from moviepy import VideoFileClip
from PIL import Image


@dataclass
class Args:
    video: tyro.conf.Positional[str]
    """MP4 that `--capture-video` made"""
    output: tyro.conf.Positional[str]
    """PNG to write"""
    count: int = 5
    """frames, evenly spaced from first to last"""
    crop: tuple[float, float, float, float] = (0.35, 0.2, 0.9, 0.75)
    """left, top, right and bottom of the part to show, as shares of the frame; here the table of the Fetch tasks"""
    height: int = 240
    """pixels"""


def main(args):
    with VideoFileClip(args.video) as clip:
        frames = list(clip.iter_frames())
    chosen = [frames[i] for i in np.linspace(0, len(frames) - 1, args.count).round().astype(int)]
    rows, columns = chosen[0].shape[:2]
    left, top, right, bottom = args.crop
    chosen = [f[int(top * rows) : int(bottom * rows), int(left * columns) : int(right * columns)] for f in chosen]
    strip = Image.fromarray(np.concatenate(chosen, axis=1))
    strip.resize((strip.width * args.height // strip.height, args.height)).save(args.output)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
