"""Values as lines of JSON carry them, in the process of an environment."""

import base64
import contextlib


def plain(value):
    """A value as JSON; numbers of numpy and torch are numbers."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, str | int | float):
        return value
    with contextlib.suppress(Exception):
        return value.item()
    return value


def result_of(value):
    """A method's result; of rewards with weights, the parts as the value."""
    if hasattr(value, "parts") and hasattr(value, "weights"):
        return {"value": plain(dict(value.parts)), "weights": plain(dict(value.weights))}
    return {"value": plain(value), "weights": None}


def results_of(values):
    """The results of a method that returns a list of them; of anything else, that as the value."""
    with contextlib.suppress(Exception):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return {"each": [result_of(one) for one in values]}
    return result_of(values)


def state_of(snapshot):
    """A snapshot, which is JSON or bytes."""
    if isinstance(snapshot, bytes | bytearray):
        return {"bytes": base64.b64encode(snapshot).decode()}
    return {"json": snapshot}


def value_of(state):
    """The snapshot that `state_of` made the value of."""
    return base64.b64decode(state["bytes"]) if "bytes" in state else state["json"]
