"""Query strings: a route takes the names that it has, each once, and refuses the others. Knows no
route and no meaning.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from starlette.requests import Request
from starlette.responses import Response

from jserve.errors import RequestError
from jserve.types.wording import nearest_name

Handler = Callable[[Request], Awaitable[Response]]


def check_query(request: Request, names: Collection[str] = ()) -> None:
    """Raises RequestError naming the first that is not of `names`, or comes twice."""
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in names:
            near = nearest_name(name, names)
            takes = f"it takes {', '.join(names)}" if names else "it takes none"
            hint = f"did you mean {near}?" if near else f"{takes}."
            rule = f"{name} is not a query parameter of {request.url.path}; {hint}"
            raise RequestError(rule, name)
        if name in seen:
            raise RequestError(f"{name} must be given once.", name)
        seen.add(name)


def with_query(handler: Handler, names: Collection[str]) -> Handler:
    """`handler`, called when the query string is right."""

    async def checked(request: Request) -> Response:
        check_query(request, names)
        return await handler(request)

    return checked
