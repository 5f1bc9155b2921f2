"""The rows of one call shared among the threads of an OpenMP library, from inside of a compiled loop.

A pool of Python threads takes a tenth of a millisecond to begin, longer than most calls last; threads that
have just run a loop of torch's own begin within microseconds.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ALONE = 0, 1
"""No team."""


def _share(typing: Any, team: Any, body: Any, arguments: Any) -> tuple[Any, Any]:
    """Call `body(part, parts, arguments)` for every part of the work.

    `team`: the address of `GOMP_parallel`, or 0, and the parts, one for each thread. Each takes the next part
    until none is left, so that the team may be smaller. What the body raises is lost.
    """
    parts = team.dtype
    typing.resolve_function_type(body, (parts, parts, arguments), {})
    compiled = body.dispatcher.overloads[parts, parts, arguments]

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        context.add_linking_libs([compiled.library])
        run_at, count, given = *(builder.extract_value(values[0], place) for place in (0, 1)), values[2]
        integer, unsigned, pointer = count.type, ir.IntType(32), ir.IntType(8).as_pointer()
        fields: Any = tools.gep_inbounds
        work = tools.alloca_once(builder, ir.LiteralStructType([integer, integer, given.type]))
        for place, value in enumerate((ir.Constant(integer, 0), count, given)):
            builder.store(value, fields(builder, work, 0, place))

        kind = ir.FunctionType(ir.VoidType(), [pointer])
        member = ir.Function(builder.module, kind, builder.module.get_unique_name("member"))
        member.linkage = "internal"
        enter, take, do, leave = (member.append_basic_block() for _ in range(4))
        inside = ir.IRBuilder(enter)
        shared = inside.bitcast(member.args[0], work.type)
        inside.branch(take)
        inside.position_at_end(take)
        part = inside.atomic_rmw("add", fields(inside, shared, 0, 0), ir.Constant(integer, 1), "monotonic")
        parts_in_all = inside.load(fields(inside, shared, 0, 1))
        inside.cbranch(inside.icmp_signed("<", part, parts_in_all), do, leave)
        inside.position_at_end(do)
        function = context.declare_function(builder.module, compiled.fndesc)
        passed = [part, parts_in_all, inside.load(fields(inside, shared, 0, 2))]
        context.call_conv.call_function(inside, function, types.none, compiled.fndesc.argtypes, passed)
        inside.branch(take)
        inside.position_at_end(leave)
        inside.ret_void()

        data = builder.bitcast(work, pointer)
        with builder.if_else(tools.is_null(builder, run_at)) as (alone, together):
            with alone:
                builder.call(member, [data])
            with together:
                start_kind = ir.FunctionType(ir.VoidType(), [member.type, pointer, unsigned, unsigned])
                start = builder.inttoptr(run_at, start_kind.as_pointer())
                builder.call(start, [member, data, builder.trunc(count, unsigned), ir.Constant(unsigned, 0)])
        return context.get_dummy_value()

    return types.none(team, body, arguments), generate


tools: Any = cgutils
share: Callable[..., None] = intrinsic(_share)
