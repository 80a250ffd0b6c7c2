"""The OpenAPI pages of the routes that FastAPI does not know, because they are bare ASGI. Plain dicts."""

from collections.abc import Collection, Mapping
from typing import Any

from deployments.http_api.request_body import ARROW, BINARY
from deployments.http_api.score_list import MOST_REQUESTS
from deployments.protocol.envelope import Envelope
from deployments.protocol.inference import SCORES
from deployments.scoring.request_form import openapi_schemas
from deployments.scoring.served_model import ServedModel

Paths = dict[str, dict[str, Any]]

TAGS = [  # in the order in which the page shows them
    {"name": "score", "description": "Scores of candidates."},
    {"name": "protocol", "description": "The same by the Open Inference Protocol v2."},
    {"name": "models", "description": "What is served."},
    {"name": "lifecycle", "description": "Versions of a model, and changes of them."},
    {"name": "health", "description": "How the service does."},
]
_SCORE_ERRORS = {
    400: "the body is not JSON, or no Arrow stream",
    401: "no bearer token, or an unknown one, where the service asks for one",
    403: "the token lacks the scope `score`",
    404: "no such model or version",
    408: "the body took too long to come",
    413: "the body or the request is too large",
    415: "the body is of another type, or compressed in another way than gzip or deflate",
    422: "a value breaks a rule; `where` is its path",
    429: "too many rows wait; Retry-After says when to come back",
    503: "the engine is closing or its device failed",
    504: "the deadline passed",
}
_REF = "#/components/schemas/{model}"
_TEXT = {"type": "string"}


def error_answers(errors: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    return {str(status): {"description": why, "content": _json(_ref("ErrorAnswer"))} for status, why in errors.items()}


def score_page(models: Mapping[str, ServedModel]) -> tuple[Paths, dict[str, Any]]:
    """(the path of `/v1/score`, the schemas it refers to), with each model's true features."""
    requests, schemas = openapi_schemas([served.form for served in models.values()])
    examples = {name: {"value": served.example} for name, served in models.items() if served.example is not None}
    one = requests[0] if len(requests) == 1 else {"anyOf": requests}
    several = {"type": "array", "items": one, "minItems": 1, "maxItems": MOST_REQUESTS}
    body: dict[str, Any] = {"schema": {"anyOf": [*requests, several]}}
    if examples:
        body["examples"] = examples
    each = {"type": "array", "items": {"anyOf": [_ref("ScoreAnswer"), _ref("ErrorAnswer")]}}
    scores = _json({"anyOf": [_ref("ScoreAnswer"), each]})
    answers = {"200": {"description": "the scores; of a list, each", "content": scores}, **error_answers(_SCORE_ERRORS)}
    arrow = {"schema": {"type": "string", "format": "binary", "description": "Candidates as columns; see docs/requests.md."}}
    content = {"application/json": body, ARROW: arrow}
    page = _operation("score", "Score candidates", "score", answers) | {"requestBody": {"required": True, "content": content}}
    return {"/v1/score": {"post": page}}, schemas


def protocol_pages() -> tuple[Paths, dict[str, Any]]:
    """(the paths of the Open Inference Protocol, the schemas they refer to)."""
    envelope = Envelope.model_json_schema(ref_template=_REF)
    schemas = envelope.pop("$defs") | {"Envelope": envelope, "ProtocolError": _object({"error": _TEXT})}
    failed = {"description": "refused", "content": _json(_ref("ProtocolError"))}

    def page(name: str, summary: str, answer: dict[str, Any], *parameters: str) -> dict[str, Any]:
        answers = {"200": {"description": "the answer", "content": _json(answer)}, "4XX": failed, "503": failed}
        where = [{"name": p, "in": "path", "required": True, "schema": _TEXT} for p in parameters]
        return _operation(name, summary, "protocol", answers) | ({"parameters": where} if where else {})

    infer = page("infer", "Score tensors", _object({"model_name": _TEXT, "outputs": {"type": "array"}}), "model")
    infer["responses"]["200"]["content"][BINARY] = {"schema": {"type": "string", "format": "binary"}}
    infer["responses"]["200"]["description"] = f"one output, `{SCORES}`, FP32 [n, tasks]"
    binary = "The envelope, and behind it the tensors' bytes; Inference-Header-Content-Length is the length of the envelope."
    content = {**_json(_ref("Envelope")), BINARY: {"schema": {"type": "string", "format": "binary", "description": binary}}}
    infer["requestBody"] = {"required": True, "content": content}
    model = "/v2/models/{model}"
    anything: dict[str, Any] = {"type": "object"}
    paths: Paths = {
        "/v2": {"get": page("server_metadata", "This server", anything)},
        "/v2/health/live": {"get": page("server_live", "The process answers", anything)},
        "/v2/health/ready": {"get": page("server_ready", "Every model takes requests", anything)},
        model: {"get": page("model_metadata", "A model's inputs and outputs", anything, "model")},
        f"{model}/config": {"get": page("model_config", "The same in Triton's words", anything, "model")},
        f"{model}/ready": {"get": page("model_ready", "The model takes requests", anything, "model")},
        f"{model}/stats": {"get": page("model_statistics", "What this replica has scored since its start", anything, "model")},
        "/v2/models/stats": {"get": page("statistics", "The same of all models", anything)},
        "/v2/repository/index": {"post": page("repository_index", "The models served here", {"type": "array"})},
        f"{model}/infer": {"post": infer},
    }
    return paths, schemas


def name_the_bearer(document: dict[str, Any], without: Collection[str]) -> None:
    """Adds to a document that every path asks for a bearer token, but for those `without`."""
    document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"bearer": []}]
    for path in without:
        for operation in document["paths"][path].values():
            operation["security"] = []


def _operation(name: str, summary: str, tag: str, answers: Mapping[Any, Any]) -> dict[str, Any]:
    return {"summary": summary, "tags": [tag], "operationId": name, "responses": dict(answers)}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _ref(schema: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=schema)}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
