"""What one site's image count can weigh at most, where sites weigh by their images.

A site says at the roll call how many training images it has, and nobody can check it: one that says a billion is all
of the mean. A cap that never touches an honest run cannot stop that, because honest counts differ by any factor, and
a share of 99 % is as good as all. So there is none unless ``participation.largest_share`` sets one; a site that has
more than :data:`HEAVY` of a run's images is named in ``events.jsonl`` with any setting.
"""

from collections.abc import Mapping

HEAVY = 0.9
"""Share of all images from which on a run is nearly one site's."""


def counted_images(images: Mapping[str, int], largest_share: float) -> dict[str, int]:
    """How many images of each site count, so that none has more than ``largest_share`` of all that count.

    Sites above the cap count as if they had as many images as the cap allows; the others stay as they are. Where even
    equal weights exceed the share, all count as the smallest does.

    Args:
        images: Stated at the roll call, by site; each at least 1.
    """
    if largest_share >= 1 or not images:
        return dict(images)
    ordered = sorted(images.values(), reverse=True)
    for capped in range(len(ordered)):
        if capped * largest_share >= 1:
            break
        most = largest_share * sum(ordered[capped:]) / (1 - capped * largest_share)  # share of (capped * most + rest)
        if ordered[capped] <= most:
            return {site: min(count, max(int(most), 1)) for site, count in images.items()}
    return dict.fromkeys(images, ordered[-1])


def heavy_sites(images: Mapping[str, int]) -> dict[str, float]:
    """The share of all images of each site that has more than :data:`HEAVY` of them, among several sites."""
    total = sum(images.values())
    shares = {site: count / total for site, count in images.items()} if total and len(images) > 1 else {}
    return {site: share for site, share in shares.items() if share > HEAVY}
