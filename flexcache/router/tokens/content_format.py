"""Tells which form of content a chat template expects: a string, or a list of parts.

A template that loops over ``message.content`` (under any name, also inside a macro that is given
it) expects parts; so does one that loops over a variable called ``content`` outside macros. This
is vLLM's rule.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

from flexcache.router.tokens.conversation import ContentFormat


def content_format(template: nodes.Template) -> ContentFormat:
    """Tell the form of content for a parsed template."""
    messages = _loops_over(template, _names_of(template))
    over_content = any(_is_over_content(template, loop, messages) for loop in _fors(template))
    return "openai" if over_content else "string"


def _fors(root: nodes.Node) -> Iterator[nodes.For]:
    return root.find_all(nodes.For)


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """Strip filters, tests and slices."""
    while isinstance(node, (nodes.Filter, nodes.Test, nodes.Getitem)):
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            break
        node = node.node
    return node


def _is_name(node: nodes.Node | None, names: set[str]) -> bool:
    node = _bare(node)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _is_content_of(node: nodes.Node | None, names: set[str]) -> bool:
    node = _bare(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and _is_name(node.node, names)
    if isinstance(node, nodes.Getitem):
        return (
            isinstance(node.arg, nodes.Const)
            and node.arg.value == "content"
            and _is_name(node.node, names)
        )
    return False


def _names_of(template: nodes.Template) -> set[str]:
    """Find the names under which the template knows the messages."""
    names = {"messages"}
    while True:
        more = {
            assign.target.name
            for assign in template.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _is_name(assign.node, names)
        }
        if more <= names:
            return names
        names |= more


def _loops_over(template: nodes.Template, names: set[str]) -> set[str]:
    """Find the loop variables that hold one message."""
    return {
        loop.target.name
        for loop in _fors(template)
        if isinstance(loop.target, nodes.Name) and _is_name(loop.iter, names)
    }


def _is_over_content(template: nodes.Template, loop: nodes.For, messages: set[str]) -> bool:
    if _is_content_of(loop.iter, messages):
        return True
    if not isinstance(loop.iter, nodes.Name):
        return False
    around = [
        macro
        for macro in template.find_all(nodes.Macro)
        if any(inner is loop for inner in _fors(macro))
    ]
    if not around:
        return loop.iter.name == "content"
    return any(loop.iter.name in _content_arguments(template, macro, messages) for macro in around)


def _content_arguments(
    template: nodes.Template, macro: nodes.Macro, messages: set[str]
) -> set[str]:
    """Find the parameters of a macro that are given a message's content."""
    names = [argument.name for argument in macro.args]
    given = set()
    for call in template.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given |= {
            name
            for name, value in zip(names, call.args, strict=False)
            if _is_content_of(value, messages)
        }
        given |= {
            keyword.key
            for keyword in call.kwargs
            if isinstance(keyword, nodes.Keyword)
            and keyword.key in names
            and _is_content_of(keyword.value, messages)
        }
    return given
