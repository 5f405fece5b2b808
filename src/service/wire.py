"""The Tinker API's encodings: protocol buffers, as today's clients send them, and JSON, as others do.

The messages are described here by their field numbers, which are the protocol's, and read and written by the
protobuf library. Both encodings are read into the same arrays.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from cairn.run.errors import CairnError


class CallRefused(CairnError):
    """What a client asks for can't be done, and the reason says what to change.

    Args:
        status: of the HTTP answer, where the request is refused at once. 404 also for what belongs to another
            tenant: it looks as if it were not there. 409, 429: the client sends it again by itself.
    """

    def __init__(self, reason: str, status: int = 400):
        super().__init__(reason)
        self.status = status


PROTO = "application/x-protobuf"
FLOAT32, INT64, INT32 = 1, 2, 3
DTYPES: dict[int, type[np.generic]] = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32}
OF_JSON: dict[str, type[np.generic]] = {"float32": np.float32, "int64": np.int64}
STOP_REASONS = ("stop", "length")
NO_TOKEN = (0, -99999.0)
"""A place among the most likely tokens of a prompt that has none: its token and logprob."""

_KINDS = {"bytes": 12, "string": 9, "int32": 5, "uint32": 13, "int64": 3, "double": 1, "bool": 8, "enum": 5}
# An enumeration has the encoding of a whole number.
_MESSAGES: dict[str, str] = {
    "SampleResponse": "repeated SampledSequence sequences 1; optional bytes prompt_logprobs 2; "
    "optional TopkLogprobs topk_prompt_logprobs 3; int32 prompt_cache_hit_tokens 4",
    "SampledSequence": "enum stop_reason 1; bytes tokens 2; optional bytes logprobs 3",
    "TopkLogprobs": "bytes token_ids 1; bytes logprobs 2; uint32 k 3; uint32 length 4",
    "SparseCsr": "bytes values 1; bytes crow_indices 2; bytes col_indices 3",
    "Tensor": "optional bytes dense 1; optional SparseCsr sparse_csr 2; enum dtype 3; repeated int64 shape 4",
    "BatchedTensor": "bytes data 1; bytes offsets 2; enum dtype 3; repeated int64 trailing_shape 4",
    "NamedBatchedTensor": "string key 1; BatchedTensor value 2",
    "ArrayRecord": "string type_tag 1; repeated NamedBatchedTensor fields 2; int64 num_datums 3",
    "NamedNumber": "string key 1; double value 2",
    "ForwardBackwardOutput": "string loss_fn_output_type 1; repeated ArrayRecord loss_fn_outputs 2; "
    "repeated NamedNumber metrics 3",
    "LossConfigValue": "optional double number 1; optional string text 2",
    "NamedLossConfigValue": "string key 1; LossConfigValue value 2",
    "EncodedTextChunk": "bytes tokens 1",
    "OtherChunk": "",
    "Chunk": "optional EncodedTextChunk encoded_text 1; optional OtherChunk image 2; "
    "optional OtherChunk dmel 3",
    "NamedTensor": "string key 1; Tensor value 2",
    "Datum": "repeated Chunk model_input 1; repeated NamedTensor loss_fn_inputs 2",
    "ForwardBackwardRequest": "string model_id 1; int32 seq_id 2; repeated Datum data 3; string loss_fn 4; "
    "repeated NamedNumber loss_fn_config 5; bool forward_only 6; "
    "repeated NamedLossConfigValue loss_fn_config_v2 7",
}
"""Fields of each message: type, name, number. A map is encoded as repeated pairs of key and value."""


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="cairn/tinker.proto", package="cairn_tinker", syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for one in filter(None, fields.split("; ")):
            *label, kind, called, number = one.split()
            made: Any = message.field.add(name=called, number=int(number))  # of whole numbers
            made.label = 3 if label == ["repeated"] else 1
            if kind in _KINDS:
                made.type = _KINDS[kind]
                if made.label == 3:
                    made.options.packed = True
            else:
                made.type, made.type_name = 11, f".cairn_tinker.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"cairn_tinker.{name}"))
        for name in _MESSAGES
    }


MESSAGES = _classes()


@dataclass(frozen=True)
class Datum:
    """A sample: tokens, int64 [N], and what the loss needs of each, by name, [N] each."""

    tokens: npt.NDArray[np.int64]
    inputs: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Pass:
    """A request for a forward pass, and unless `forward_only` for a backward pass."""

    model_id: str
    seq_id: int | None
    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    forward_only: bool = False

    def digest(self) -> bytes:
        """Of all that it asks for: the same however it was encoded."""
        found = hashlib.blake2b(digest_size=16)
        head = (self.loss_fn, self.forward_only, sorted(self.config.items()), len(self.data))
        found.update(repr(head).encode())
        for datum in self.data:
            for name, values in (("", datum.tokens), *sorted(datum.inputs.items())):
                found.update(f"{name} {values.dtype} {values.shape} ".encode())
                found.update(np.ascontiguousarray(values).tobytes())
        return found.digest()


def read_pass(body: bytes, *, proto: bool, forward_only: bool = False) -> Pass:
    """Of a request's body.

    Raises:
        CallRefused: it can't be read, or has what this service does not take; the reason says what.
    """
    if proto:
        message = MESSAGES["ForwardBackwardRequest"]()
        try:
            message.ParseFromString(body)
        except DecodeError as error:
            raise CallRefused(f"the body is no forward_backward request: {error}") from None
        config: dict[str, float | str] = {one.key: one.value for one in message.loss_fn_config}
        for one in message.loss_fn_config_v2:
            config[one.key] = one.value.text if one.value.HasField("text") else one.value.number
        data = [
            Datum(
                _joined([_proto_chunk(chunk) for chunk in one.model_input]),
                {pair.key: _proto_tensor(pair.key, pair.value) for pair in one.loss_fn_inputs},
            )
            for one in message.data
        ]
        seq = message.seq_id or None
        return Pass(
            message.model_id, seq, data, message.loss_fn, config, message.forward_only or forward_only
        )
    found = read_json(body)
    asked = taken(found, "forward_input" if "forward_input" in found else "forward_backward_input", dict)
    data = []
    for one in taken(asked, "data", list):
        chunks = [_json_chunk(chunk) for chunk in taken(taken(one, "model_input", dict), "chunks", list)]
        inputs = taken(one, "loss_fn_inputs", dict)
        data.append(Datum(_joined(chunks), {name: _json_tensor(name, v) for name, v in inputs.items()}))
    return Pass(
        taken(found, "model_id", str),
        found.get("seq_id"),
        data,
        taken(asked, "loss_fn", str),
        asked.get("loss_fn_config") or {},
        forward_only,
    )


def read_json(body: bytes) -> dict[str, Any]:
    """The object that a body is.

    Raises:
        CallRefused: it is none.
    """
    try:
        found = json.loads(body or b"{}")
    except ValueError as error:
        raise CallRefused(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise CallRefused(f"the body is {type(found).__name__}, and should be an object")
    return found


def taken(found: Any, name: str, kind: type[Any]) -> Any:
    """A field of a JSON object.

    Raises:
        CallRefused: it is missing, or of another type.
    """
    value = found.get(name) if isinstance(found, dict) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CallRefused(f"{name}: {str(value)[:80]!r} is given, and {kind.__name__} is wanted")
    return value


def prompt_of(model_input: Any) -> list[int]:
    """The tokens of a JSON `ModelInput`.

    Raises:
        CallRefused: it has other chunks than text, or none.
    """
    chunks = [_json_chunk(chunk) for chunk in taken(model_input, "chunks", list)]
    return _joined(chunks).tolist()


def _joined(chunks: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    tokens = np.concatenate(chunks) if chunks else np.empty(0, np.int64)
    if not len(tokens):
        raise CallRefused("model_input has no tokens")
    return tokens


def _proto_chunk(chunk: Any) -> npt.NDArray[np.int64]:
    if not chunk.HasField("encoded_text"):
        raise CallRefused(
            "model_input: only chunks of text (EncodedTextChunk) are taken; this service has no images"
        )
    return np.frombuffer(chunk.encoded_text.tokens, np.int32).astype(np.int64)


def _json_chunk(chunk: Any) -> npt.NDArray[np.int64]:
    kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
    if kind != "encoded_text":
        raise CallRefused(f"model_input: only chunks of text (encoded_text) are taken, and one is {kind!r}")
    try:
        return np.array(taken(chunk, "tokens", list), np.int64)
    except (ValueError, TypeError, OverflowError):
        raise CallRefused("model_input: tokens are not all whole numbers") from None


SPARSE = (
    "loss_fn_inputs {name!r} is sparse or has several values for a token; one value for each token is taken"
)


def _proto_tensor(name: str, tensor: Any) -> npt.NDArray[Any]:
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise CallRefused(SPARSE.format(name=name))
    if tensor.dtype not in DTYPES:
        raise CallRefused(
            f"loss_fn_inputs {name!r}: the data type {tensor.dtype} is neither float32 nor int64"
        )
    try:
        return np.frombuffer(tensor.dense, DTYPES[tensor.dtype])
    except ValueError as error:
        raise CallRefused(f"loss_fn_inputs {name!r}: {error}") from None


def _json_tensor(name: str, tensor: Any) -> npt.NDArray[Any]:
    dtype = taken(tensor, "dtype", str)
    if tensor.get("sparse_crow_indices") is not None or len(tensor.get("shape") or [0]) > 1:
        raise CallRefused(SPARSE.format(name=name))
    if dtype not in OF_JSON:
        raise CallRefused(f"loss_fn_inputs {name!r}: the data type {dtype!r} is neither float32 nor int64")
    try:
        with np.errstate(over="ignore"):  # what float32 has no room for is infinity, which losses refuse
            return np.array(taken(tensor, "data", list), OF_JSON[dtype])
    except (ValueError, TypeError, OverflowError) as error:
        raise CallRefused(f"loss_fn_inputs {name!r}: {error}") from None


# Answers: written once as protocol buffers, which are kept, and read again for clients that want JSON.


def passed(logprobs: Sequence[npt.NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """The answer to a pass: the logprobs of each sample's targets, float32 [N], and metrics."""
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    ends = np.cumsum([0, *(values.nbytes for values in logprobs)], dtype=np.int64)
    field = record.fields.add(key="logprobs")
    field.value.data = b"".join(values.astype(np.float32).tobytes() for values in logprobs)
    field.value.offsets, field.value.dtype = ends.tobytes(), FLOAT32
    for key, value in sorted(metrics.items()):
        message.metrics.add(key=key, value=value)
    return message.SerializeToString(deterministic=True)


def passed_json(answer: bytes) -> dict[str, Any]:
    """The same as JSON."""
    message = MESSAGES["ForwardBackwardOutput"]()
    message.ParseFromString(answer)
    outputs: list[dict[str, Any]] = []
    for record in message.loss_fn_outputs:
        (pair,) = record.fields
        ends = np.frombuffer(pair.value.offsets, np.int64) // 4
        values = np.frombuffer(pair.value.data, np.float32)
        for start, end in itertools.pairwise(ends):
            data = values[start:end].tolist()
            outputs.append({"logprobs": {"data": data, "dtype": "float32", "shape": [len(data)]}})
    metrics = {one.key: one.value for one in message.metrics}
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": metrics}


def sampled(
    sequences: Sequence[tuple[Sequence[int], Sequence[float], str]],
    prompt_logprobs: Sequence[float | None] | None = None,
    likely: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> bytes:
    """The answer to a request for samples.

    Args:
        sequences: tokens, their logprobs, and why each ended: stop or length.
        prompt_logprobs: of each token of the prompt; None for those that have none, as the first one.
        likely: the most likely tokens at each place of the prompt with their logprobs; none for the same.
    """
    message = MESSAGES["SampleResponse"]()
    for tokens, logprobs, reason in sequences:
        one = message.sequences.add(stop_reason=STOP_REASONS.index(reason))
        one.tokens, one.logprobs = (
            np.array(tokens, np.int32).tobytes(),
            np.array(logprobs, np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        values = [np.nan if value is None else value for value in prompt_logprobs]
        message.prompt_logprobs = np.array(values, np.float32).tobytes()
    if likely is not None:
        top, count = message.topk_prompt_logprobs, max(map(len, likely))
        filled = [[*found, *[NO_TOKEN] * (count - len(found))] for found in likely]
        top.k, top.length = count, len(filled)
        top.token_ids = np.array([[id for id, _ in row] for row in filled], np.int32).tobytes()
        top.logprobs = np.array([[value for _, value in row] for row in filled], np.float32).tobytes()
    return message.SerializeToString(deterministic=True)


def sampled_json(answer: bytes) -> dict[str, Any]:
    """The same as JSON."""
    message = MESSAGES["SampleResponse"]()
    message.ParseFromString(answer)
    found: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "tokens": np.frombuffer(one.tokens, np.int32).tolist(),
                "logprobs": np.frombuffer(one.logprobs, np.float32).tolist(),
                "stop_reason": STOP_REASONS[one.stop_reason],
            }
            for one in message.sequences
        ],
    }
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs, np.float32).tolist()
        found["prompt_logprobs"] = [None if np.isnan(value) else value for value in values]
    if message.HasField("topk_prompt_logprobs"):
        top = message.topk_prompt_logprobs
        ids, values = np.frombuffer(top.token_ids, np.int32), np.frombuffer(top.logprobs, np.float32)
        flat = iter(zip(ids.tolist(), values.tolist(), strict=True))
        rows = [list(itertools.islice(flat, top.k)) for _ in range(top.length)]
        rows = [[pair for pair in row if pair != NO_TOKEN] for row in rows]
        found["topk_prompt_logprobs"] = [row or None for row in rows]
    return found
