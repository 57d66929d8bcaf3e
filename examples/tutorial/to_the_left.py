"""A custom reward: how far to the left is what was drawn?"""

from __future__ import annotations

import numpy as np


def to_the_left(images, prompts, metadata, *, paint=80):
    """1 when all paint touches the left edge, 0 at the right edge or on an empty picture.

    A pixel is paint when one of its channels is ``paint`` or more below white.
    """
    scores, painted = [], []
    for image in images:
        columns = np.nonzero(image.min(axis=2) <= 255 - paint)[1]
        scores.append(1 - columns.mean() / (image.shape[1] - 1) if columns.size else 0.0)
        painted.append(columns.size / image[..., 0].size)
    return {"score": scores, "painted": painted}
