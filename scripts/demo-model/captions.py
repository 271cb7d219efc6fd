"""Captions for an item: its CLDR name, an alias or a keyword in a small set of templates."""

import random


def article(name):
    vowel = name[0] in "aeiou" and not name.startswith(("one", "uni", "ufo"))
    return "an" if vowel else "a"


def with_article(item, name):
    return name if name in item["plural"] else f"{article(name)} {name}"


def plain(item):
    """The item's name with its article."""
    return with_article(item, item["names"][0])


def caption(item, rng=random):
    """A random caption; six in ten use the item's own name."""
    names, keywords = item["names"], item["unique_tags"]
    r = rng.random()
    if r < 0.60 or (r < 0.85 and len(names) == 1 and not keywords):
        name = names[0]
    elif r < 0.85:
        name = rng.choice(names[1:] + keywords[:2])
    elif r < 0.93 and keywords:
        name = rng.choice(keywords)
    else:
        name = names[0]
        if item["tags"]:
            tag = rng.choice(item["tags"])
            return rng.choice([f"{name}, {tag}", f"{tag}, {name}", f"{name} {tag}"])
    one = with_article(item, name)
    return rng.choice(
        [
            name,
            name,
            one,
            one,
            one,
            f"an emoji of {one}",
            f"{name} emoji",
            f"a picture of {one}",
            f"{one} on a white background",
            f"an emoji of {one} on a white background",
            f"the {name}",
            f"a drawing of {one}",
        ]
    )
