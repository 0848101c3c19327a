"""Messages of Envoy's external processing protocol, and what the Gateway API Inference Extension
puts into them (its proposal 004)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

from flexcache.errors import MissingDependencyError
from flexcache.router.chooser import NotRouted

try:
    from envoy.config.core.v3.base_pb2 import (
        HeaderMap,
        HeaderValue,
        HeaderValueOption,
        Metadata,
    )
    from envoy.service.ext_proc.v3.external_processor_pb2 import (
        BodyMutation,
        BodyResponse,
        CommonResponse,
        HeaderMutation,
        HeadersResponse,
        HttpBody,
        ImmediateResponse,
        ProcessingRequest,
        ProcessingResponse,
        StreamedBodyResponse,
        TrailersResponse,
    )
    from envoy.type.v3.http_status_pb2 import HttpStatus
    from google.protobuf.struct_pb2 import Struct
except ImportError as error:
    raise MissingDependencyError(
        f"the endpoint picker needs the package {error.name}: pip install '.[gateway]'"
    ) from None

DESTINATION = "x-gateway-destination-endpoint"
"""Header and metadata entry: ``IP:PORT[,IP:PORT...]``, in the order in which they are tried."""
_LB = "envoy.lb"
_SUBSET_SPACE = "envoy.lb.subset_hint"
_SUBSET = "x-gateway-destination-endpoint-subset"
_SERVED = "x-gateway-destination-endpoint-served"
_UPSTREAM = "upstream.address"


# -- what Envoy sends ------------------------------------------------------------------------------


def read_headers(headers: HeaderMap) -> dict[str, str]:
    """Return header fields, pseudo-headers included; of repeated ones the last."""
    return {
        each.key: each.raw_value.decode("latin-1") if each.raw_value else each.value
        for each in headers.headers
    }


def subset_of(metadata: Metadata) -> tuple[str, ...] | None:
    """Return the endpoints to choose from; None: all."""
    value = _entry(metadata, _SUBSET_SPACE, _SUBSET)
    if value is None:
        return None
    texts = value.split(",") if isinstance(value, str) else value
    return tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())


def served_by(message: ProcessingRequest) -> str | None:
    """Return the endpoint that an answer comes from: as the protocol has it in the metadata, or as
    Envoy alone can report it, as an attribute; None if neither is configured."""
    value = _entry(message.metadata_context, _LB, _SERVED)
    if value is None:
        for attributes in message.attributes.values():
            if _UPSTREAM in attributes.fields:
                value = attributes.fields[_UPSTREAM].string_value
    return value if isinstance(value, str) and value else None


def _entry(metadata: Metadata, space: str, key: str) -> str | list[object] | None:
    if space not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[space].fields
    if key not in fields:
        return None
    kind = fields[key].WhichOneof("kind")
    if kind == "list_value":
        return [each.string_value for each in fields[key].list_value.values]
    return str(fields[key].string_value)


# -- what Envoy is answered ------------------------------------------------------------------------


def mutation(fields: Mapping[str, str], removed: Iterable[str] = ()) -> HeaderMutation:
    """Set header fields, in place of those of the same names, and remove others."""
    return HeaderMutation(
        set_headers=[
            HeaderValueOption(
                header=HeaderValue(key=name.lower(), raw_value=value.encode("latin-1")),
                append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in fields.items()
        ],
        remove_headers=list(removed),
    )


def destined(headers: HeaderMutation, destinations: str) -> ProcessingResponse:
    """Send a request to the first of some endpoints that can be reached."""
    metadata = Struct()
    metadata.update({_LB: {DESTINATION: destinations}})
    common = CommonResponse(header_mutation=headers, clear_route_cache=True)
    return ProcessingResponse(
        request_headers=HeadersResponse(response=common), dynamic_metadata=metadata
    )


def headers_of_answer(headers: HeaderMutation) -> ProcessingResponse:
    """Pass the headers of an answer on, changed."""
    common = CommonResponse(header_mutation=headers)
    return ProcessingResponse(response_headers=HeadersResponse(response=common))


def streamed(chunk: HttpBody) -> BodyResponse:
    """Pass a piece of a body on, where Envoy leaves that to the processor."""
    piece = StreamedBodyResponse(body=chunk.body, end_of_stream=chunk.end_of_stream)
    return BodyResponse(
        response=CommonResponse(body_mutation=BodyMutation(streamed_response=piece))
    )


REQUEST_TRAILERS = ProcessingResponse(request_trailers=TrailersResponse())
RESPONSE_TRAILERS = ProcessingResponse(response_trailers=TrailersResponse())
RESPONSE_BODY = ProcessingResponse(response_body=BodyResponse())
"""Passes a piece of the answer's body on, where Envoy keeps it meanwhile."""


def refusal(error: NotRouted) -> ProcessingResponse:
    """Answer a request without an engine."""
    fields = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        fields["retry-after"] = str(math.ceil(error.retry_after_s))
    content = {"error": {"message": str(error), "type": "router_error", "code": error.status}}
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=error.status),
            headers=mutation(fields),
            body=json.dumps(content).encode(),
            details="flexcache_router",
        )
    )
