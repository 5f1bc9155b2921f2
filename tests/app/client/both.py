"""Both clients under one face, so that every test of one is a test of the other."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from boxcal.app.client import AsyncBoxcalClient, BoxcalClient

Ask = Callable[..., Any]


def ask_blocking(url: str, name: str, *args: Any, retries: Any = None, timeout: float = 30, **kw: Any) -> Any:
    with BoxcalClient(url, retries=retries, timeout=timeout) as client:
        result = getattr(client, name)(*args, **kw)
        return list(result) if inspect.isgenerator(result) else result


def ask_async(url: str, name: str, *args: Any, retries: Any = None, timeout: float = 30, **kw: Any) -> Any:
    async def run() -> Any:
        async with AsyncBoxcalClient(url, retries=retries, timeout=timeout) as client:
            result = getattr(client, name)(*args, **kw)
            return [item async for item in result] if inspect.isasyncgen(result) else await result

    return asyncio.run(run())
