"""The sandbox of chat templates: that of Jinja2, with a bound on the work of a rendering.

A template comes with a model, from people whom nobody knows. Its work is counted in units before it is done: about one
for each character that is made or read, ITEM for each item of a list or mapping, and STEP for each call, filter and
turn of a loop. So neither time nor memory nor output can grow beyond the bound, whatever the template does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

WORK = 1 << 26  # units of a rendering, and
WORK_PER_UNIT = 64  # as many for each unit of what it is given
STEP, ITEM = 64, 8
WORD_BITS = 32  # of a large integer, a unit

# Filters that read nothing but the size of their value; that read its items, but not what is in them; and that are left
# out, because their work has no simple bound and templates of chats need none.
CONSTANT = {"length", "count", "first", "last", "default", "d", "attr", "safe"}
LAZY = {"list", "reverse", "items", "map", "batch", "slice", "random", "select", "reject", "selectattr", "rejectattr"}
LEFT_OUT = ("pprint", "striptags", "urlize", "wordwrap")
READING = {"eq", "ne", "lt", "le", "gt", "ge", "in", "==", "!=", "<", "<=", ">", ">="}  # tests that read a whole value
READING |= {"equalto", "greaterthan", "lessthan", "lower", "upper"}
SLOW = {"rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip"}  # methods: a product of two lengths


class TooMuchWork(Exception):
    """A template does more than it may."""


class Budget:
    """The units that a rendering has left."""

    def __init__(self, units: int) -> None:
        self.left = units

    def spend(self, units: int) -> None:
        """Takes units. Raises TooMuchWork if there are not so many."""
        self.left -= units
        if self.left < 0:
            raise TooMuchWork


_of_rendering: ContextVar[Budget | None] = ContextVar("budget of the template that is rendered", default=None)


def _budget() -> Budget:
    budget = _of_rendering.get()
    if budget is None:
        raise nodes.Impossible  # for Jinja2: this has no value when the template is compiled
    return budget


@contextmanager
def bounded(given: object) -> Iterator[None]:
    """A rendering in this context has the budget for what it is given, such as a list of messages."""
    before = _of_rendering.get()
    _of_rendering.set(Budget(WORK + WORK_PER_UNIT * weight(given, 1 << 62)))
    try:
        yield
    finally:
        _of_rendering.set(before)


def weight(value: object, most: int) -> int:
    """The units of a value with everything in it. Raises TooMuchWork if they are more than `most`."""
    if type(value) is str:
        return ITEM + len(value)
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        total += ITEM
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            total += ITEM * len(item)
            waiting += item
        elif isinstance(item, range):
            total += ITEM * len(item)
        elif isinstance(item, Namespace):
            total += STEP
            waiting += object.__getattribute__(item, "_Namespace__attrs").values()
        elif isinstance(item, int):
            total += item.bit_length() // WORD_BITS
        if total > most:
            raise TooMuchWork
    return total


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates are rendered within `bounded`. Blocks are trimmed, as transformers has it."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, extensions: Sequence[type[Extension]] = ()) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_written
        )
        for name in LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters |= OURS

    def counting(self, source: str) -> jinja2.Template:
        """The template of a source, whose loops, calls, filters, comparisons and new lists are counted.

        Raises what Jinja2 and Python raise for a source that is not one, or too deep for them.
        """
        tree = _Counting().visit(self.parse(source))
        return self.from_string(tree.set_environment(self))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator."""
        budget = _budget()
        if operator == "+" and type(left) is type(right) is str:  # by far the most frequent one
            budget.spend(len(left) + len(right))
            return left + right
        budget.spend(_operator_cost(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        context: Context | None = None,
        eval_ctx: nodes.EvalContext | None = None,
    ) -> Any:
        """The result of a filter."""
        budget = _budget()
        value = [*value] if name == "join" else value  # what an iterator has left cannot be counted
        budget.spend(STEP + _filter_cost(name, value, [*(args or ()), *(kwargs or {}).values()], budget.left))
        result = super().call_filter(name, value, args, kwargs, context, eval_ctx)
        budget.spend(_size(result))
        return result

    def call_test(
        self,
        name: str,
        value: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        context: Context | None = None,
        eval_ctx: nodes.EvalContext | None = None,
    ) -> Any:
        """The result of a test."""
        budget = _budget()
        budget.spend(STEP + (weight([value, *(args or ())], budget.left) if name in READING else 0))
        return super().call_test(name, value, args, kwargs, context, eval_ctx)


# The following are filters: what the changed syntax tree of a template has in place of its own nodes.


def _weighed(value: Any) -> Any:
    """Of a comparison, and of a new list, tuple, mapping or slice."""
    budget = _budget()
    budget.spend(weight(value, budget.left))
    return value


def _searched(value: Any) -> Any:
    """What `in` looks through."""
    return value if isinstance(value, dict) else _weighed(value)


def _joined(values: list[Any]) -> str:
    """The operator ~."""
    _weighed(values)
    texts = [*map(str, values)]
    _budget().spend(sum(map(len, texts)))
    return "".join(texts)


def _stepped(units: int) -> bool:
    """The beginning of a body, and of the condition of a loop."""
    _budget().spend(units)
    return True


Arguments = tuple[list[Any], dict[str, Any], Any, Any]  # in order, by name, and those after * and **


def _merged(given: Arguments) -> tuple[list[Any], dict[str, Any]]:
    args, options, more_args, more_options = given
    return [*args, *(more_args or ())], {**options, **(more_options or {})}


@jinja2.pass_context
def _filtered(context: Context, value: Any, name: str, given: Arguments) -> Any:
    return context.environment.call_filter(name, value, *_merged(given), context)


@jinja2.pass_context
def _tested(context: Context, value: Any, name: str, given: Arguments) -> Any:
    return context.environment.call_test(name, value, *_merged(given), context)


@jinja2.pass_context
def _called(context: Context, function: Any, given: Arguments) -> Any:
    """A call, such as that of a method of a text."""
    budget = _budget()
    budget.spend(STEP)
    args, options = _merged(given)
    owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    name = getattr(function, "__name__", "")
    if name == "join" and isinstance(owner, str) and args:
        args[0] = [*args[0]]
    if isinstance(owner, str | bytes | int | float | list | tuple):
        budget.spend(_method_cost(owner, name, [*args, *options.values()]))
    elif owner is None and not isinstance(function, Macro | LoopContext):
        _weighed((args, options))
    environment = context.environment
    assert isinstance(environment, Sandbox)
    result = environment.call(context, function, *args, **options)
    budget.spend(_size(result))
    return result


def _macro(function: Any) -> Any:
    """What {% call %} calls."""
    if isinstance(function, Macro):
        return function
    raise jinja2.TemplateRuntimeError("{% call %} is for macros")


OURS: dict[str, Callable[..., Any]] = {
    f"cdrmix{function.__name__}": function
    for function in (_weighed, _searched, _joined, _stepped, _filtered, _tested, _called, _macro)
}


def _written(value: Any) -> str:
    """What {{ }} writes of a value."""
    if type(value) is not str:
        value = str(_weighed(value))
    _budget().spend(len(value))
    return value


class _Counting(NodeTransformer):
    """Puts our filters into a syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        _step_first(node, node.body)
        if node.test is not None:
            node.test = nodes.And(_step(STEP, node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.Block) -> nodes.Macro | nodes.Block:
        self.generic_visit(node)
        _step_first(node, node.body)
        return node

    visit_Block = visit_Macro

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        call = node.call
        node.call = nodes.Call(nodes.Const(None), [], [], None, None)  # Jinja2 needs a call there: it stays one
        self.generic_visit(node)
        node.call = call
        self.generic_visit(call)
        if not isinstance(call.node, nodes.ExtensionAttribute):
            call.node = _filter(call.node, _macro)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node.node, _called, _arguments(node))

    def visit_Filter(self, node: nodes.Filter) -> nodes.Expr:
        self.generic_visit(node)
        if node.name in CONSTANT:
            return node
        name = nodes.Const(node.name, lineno=node.lineno)
        return _filter(node.node, _filtered, name, _arguments(node), lineno=node.lineno)

    def visit_Test(self, node: nodes.Test) -> nodes.Expr:
        self.generic_visit(node)
        if node.name not in READING:
            return node
        return _filter(node.node, _tested, nodes.Const(node.name, lineno=node.lineno), _arguments(node))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                operand.expr = _filter(operand.expr, _searched)
            elif len(node.ops) > 1 or not any(isinstance(each, nodes.Const) for each in (node.expr, operand.expr)):
                operand.expr = _filter(operand.expr, _weighed)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _joined)

    def visit_List(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _filter(node, _weighed)

    visit_Tuple = visit_Dict = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, _weighed) if isinstance(node.arg, nodes.Slice) else node


def _filter(
    node: nodes.Expr | None, function: Callable[..., Any], *args: nodes.Expr, lineno: int | None = None
) -> nodes.Filter:
    line = lineno if node is None else node.lineno
    return nodes.Filter(node, f"cdrmix{function.__name__}", [*args], [], None, None, lineno=line)


def _arguments(node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Tuple:
    """The Arguments of a call."""
    line = node.lineno
    options = [nodes.Pair(nodes.Const(each.key, lineno=line), each.value, lineno=line) for each in node.kwargs]
    nothing = nodes.Const(None, lineno=line)
    items = [nodes.List(node.args, lineno=line), nodes.Dict(options, lineno=line)]
    return nodes.Tuple([*items, node.dyn_args or nothing, node.dyn_kwargs or nothing], "load", lineno=line)


def _step_first(node: nodes.Node, body: list[nodes.Node]) -> None:
    """Puts a step before the statements of a body. It costs the characters that the body writes as they are."""
    written = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
    written += sum(len(each.value) for each in node.find_all(nodes.Const) if isinstance(each.value, str))
    body.insert(0, nodes.ExprStmt(_step(STEP + written, node.lineno), lineno=node.lineno))


def _step(units: int, line: int) -> nodes.Filter:
    return _filter(nodes.Const(units, lineno=line), _stepped)


def _filter_cost(name: str, value: Any, more: list[Any], left: int) -> int:
    if name in CONSTANT:
        return 0
    cost = ITEM * _size(value) if name in LAZY else weight((value, more), left)
    numbers = [abs(each) for each in more if isinstance(each, int)]
    if name == "replace":
        cost += _replacing(str(value), [*map(str, more)])
    elif name == "join":
        cost += len(value) * sum(_size(each) for each in more)
    elif name == "format":
        cost += _format_cost(str(value), more, left)
    elif name in ("tojson", "indent"):  # each line may begin with as many
        cost += cost * sum(_size(each) if isinstance(each, str) else abs(each) for each in more if not _is_flag(each))
        cost *= _depth(value) if name == "tojson" else 1
    elif name == "trim":
        cost += len(str(value)) * sum(map(_size, more))
    elif name in ("batch", "slice", "center", "round", "truncate"):
        cost += ITEM * sum(numbers)
    elif name == "sum" and any(not isinstance(each, int | float | str) for each in more):
        cost *= 1 + _size(value)
    return cost


def _method_cost(owner: Any, name: str, more: list[Any]) -> int:
    left = _budget().left
    cost = weight((owner, more), left)
    numbers = sum(abs(each) for each in more if isinstance(each, int))
    if name == "replace":
        cost += _replacing(owner, more)
    elif name == "join":
        cost += len(owner) * len(more[0]) if more else 0
    elif name in ("format", "format_map"):
        cost += _format_cost(owner, more, left)
    elif name in ("split", "rsplit", "splitlines"):
        pieces = owner.count(more[0]) if more and isinstance(more[0], type(owner)) and more[0] else len(owner)
        cost += ITEM * ITEM * pieces
    elif name == "translate":
        cost += len(owner) * weight(more, left)
    elif name == "expandtabs":
        cost += len(owner) * (numbers or 8)
    if name in SLOW:
        cost += len(owner) * sum(len(each) for each in more if isinstance(each, type(owner)))
    elif name in ("ljust", "rjust", "center", "zfill", "to_bytes"):
        cost += numbers
    return cost


def _replacing(text: Any, args: list[Any]) -> int:
    """The characters that `replace` writes at most in addition."""
    if len(args) < 2 or not all(isinstance(each, type(text)) for each in args[:2]):
        return 0
    return int(text.count(args[0])) * len(args[1])


def _format_cost(text: str, values: list[Any], left: int) -> int:
    """The characters that a format writes at most: each field all values and all widths."""
    fields = text.count("{") + text.count("%")
    widths = sum(int(digits) if len(digits) < 10 else 10**10 for digits in re.findall(r"\d+", text))
    waiting, numbers = [*values], 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, int):
            numbers += abs(item)  # a width can be a value
        elif isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, Mapping):
            waiting += item.values()
    return fields * (weight(values, left) + widths + (numbers if "*" in text or "{:{" in text or ":" in text else 0))


def _operator_cost(operator: str, left: Any, right: Any) -> int:
    if operator == "*":
        for times, value in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, str | bytes | list | tuple):
                return max(0, times) * len(value) * (1 if isinstance(value, str | bytes) else ITEM)
    if operator == "%" and isinstance(left, str):
        values = [*right] if isinstance(right, tuple) else [right]
        return len(left) + _format_cost(left, values, _budget().left)
    if isinstance(left, int) and isinstance(right, int):
        words = left.bit_length() // WORD_BITS + 1
        return (words * max(right, 1)) ** 2 if operator == "**" else words * (right.bit_length() // WORD_BITS + 1)
    return _size(left) + _size(right)


def _size(value: Any) -> int:
    """The units of a value without those of what is in it."""
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM * len(value) if isinstance(value, list | tuple | range | dict) else 1


def _depth(value: Any) -> int:
    """How deep lists and mappings lie in one another, at least 1."""
    depth, level = 1, [value]
    while level := [
        item
        for each in level
        if isinstance(each, list | tuple | Mapping)
        for item in (each.values() if isinstance(each, Mapping) else each)
    ]:
        depth += 1
    return depth


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or not isinstance(value, int | str)
