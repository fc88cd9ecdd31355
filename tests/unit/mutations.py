"""Valid inputs with something wrong in them: what gets deeper into a parser than noise does."""

import copy
from typing import Any

from hypothesis import strategies as st

ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 99)
    | st.sampled_from([-1, 2**31, 2**63, 2**64, 10**400, 1e999, -1e999, "nan", "", "x" * 500])
    | st.floats()
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def changed_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """`valid` with bytes flipped, left out, doubled or put in, at a few places."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(1, 9))
        what = draw(st.sampled_from(["flip", "drop", "double", "insert", "cut"]))
        if what == "flip" and at < len(data):
            data[at] ^= draw(st.integers(1, 255))
        elif what == "drop":
            del data[at : at + length]
        elif what == "double":
            data[at:at] = data[at : at + length]
        elif what == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=length))
        elif what == "cut":
            del data[at:]
    return bytes(data)


@st.composite
def changed_json(
    draw: st.DrawFn, valid: Any, values: st.SearchStrategy[Any] = ANY_JSON, *, changes_max: int = 3
) -> Any:
    """`valid` with one of its values, however deep, replaced, left out or joined by another."""
    tree = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, changes_max))):
        places = list(_places(tree))
        if not places:
            return draw(values)
        holder, key = draw(st.sampled_from(places))
        what = draw(st.sampled_from(["replace", "replace", "drop", "add"]))
        if what == "replace":
            holder[key] = draw(values)
        elif what == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw(st.text(max_size=5))] = draw(values)
        else:
            holder.insert(key, draw(values))
    return tree


def _places(tree: Any) -> Any:
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in list(keys):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])
