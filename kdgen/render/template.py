"""Jinja as kdgen uses it: strict, over one directory, with errors that name the template line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import (
    Environment,
    FileSystemLoader,
    StrictUndefined,
    TemplateError,
    TemplateNotFound,
    TemplateSyntaxError,
    UndefinedError,
    meta,
)

from kdgen.errors import RenderError
from kdgen.render.marks import RESERVED, Stamps, place_marks, remove_stamps
from kdgen.render.numbers import Numbers, f32, f64, literal, name_of, names_of

_UNDEFINED = re.compile(r"'(\w+)' is undefined")


class _NamedUndefined(StrictUndefined):
    """Says which of the context's objects lacks the attribute, and what it has."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        owner = self._undefined_obj
        if isinstance(owner, Numbers):
            wanted = str(self._undefined_name)
            return f"'{name_of(owner)}' has no '{wanted}'; {_hint(wanted, names_of(owner))}"
        return super()._undefined_message


def _hint(wanted: str, known: list[str]) -> str:
    near = get_close_matches(wanted, known, 3, 0.5)
    return f"near: {', '.join(near)}" if near else f"it has: {', '.join(known) or 'nothing'}"


@lru_cache(maxsize=8)
def environment(root: Path, stamped: bool) -> Environment:
    """The Jinja environment over a templates directory."""
    env = Environment(
        loader=FileSystemLoader(root),
        undefined=_NamedUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the text is C++, not HTML
        finalize=literal,
        extensions=[Stamps] if stamped else [],
    )
    env.globals = {"range": range, "namespace": env.globals["namespace"]}
    env.filters.update(f32=f32, f64=f64)
    return env


def render_template(root: Path, name: str, context: Mapping[str, Any], marks: bool) -> tuple[str, str]:
    """Render a template.

    Args:
        root: the templates directory.
        name: the template, relative to it.
        context: every name the template may use.
        marks: also make the copy with `#line` marks.

    Returns:
        the clean text, and the text to compile: marked, or clean again.

    Raises:
        RenderError: with `templates/NAME:line` and what is wrong there.
    """
    clean = _render(root, name, context, stamped=False)
    if not marks:
        return clean, clean
    stamped = _render(root, name, context, stamped=True)
    if remove_stamps(stamped) != clean:
        raise RenderError(
            f"templates/{name}: the text changes when it is marked with its lines; do not filter or compare captured text "
            "({% set x %}…{% endset %}, {% filter %}, macro results)"
        )
    return clean, place_marks(stamped)


def _render(root: Path, name: str, context: Mapping[str, Any], stamped: bool) -> str:
    try:
        return environment(root, stamped).get_template(name).render(context)
    except UndefinedError as error:
        message = str(error.message)
        found = _UNDEFINED.search(message)
        if found:
            message = f"{message}; {_hint(found[1], sorted(context))}"
        raise RenderError(f"{_where(error, root, name)}: {message}") from error
    except TemplateSyntaxError as error:
        raise RenderError(f"templates/{error.name or name}:{error.lineno}: {error.message}") from error
    except TemplateNotFound as error:
        if error.name == name:
            raise RenderError(f"templates/{name}: no such template") from error
        raise RenderError(f"{_where(error, root, name)}: no such template: '{error.name}'") from error
    except UnicodeDecodeError as error:
        raise RenderError(f"{_where(error, root, name)}: a template is not UTF-8: {error}") from error
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RenderError(f"{_where(error, root, name)}: {error}") from error


def _where(error: BaseException, root: Path, name: str) -> str:
    """`templates/NAME:line` of the innermost template frame; Jinja gives its frames the template's file and line."""
    place = f"templates/{name}"
    trace = error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.is_relative_to(root):
            place = f"templates/{file.relative_to(root).as_posix()}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def template_files(root: Path, name: str) -> dict[str, bytes]:
    """A template and everything it includes or imports, by name, as bytes.

    Raises:
        RenderError: one is missing, is not valid, or includes a name that is computed.
    """
    env = environment(root, False)
    found: dict[str, bytes] = {}
    waiting = [(name, "")]
    while waiting:
        current, asker = waiting.pop()
        if current in found:
            continue
        try:
            text, path, _ = env.loader.get_source(env, current) if env.loader else ("", None, None)
            found[current] = Path(path).read_bytes() if path else text.encode()
            referenced = list(meta.find_referenced_templates(env.parse(text, current)))
        except TemplateNotFound as error:
            suffix = f" (included by templates/{asker})" if asker else ""
            raise RenderError(f"templates/{current}: no such template{suffix}") from error
        except TemplateSyntaxError as error:
            raise RenderError(f"templates/{current}:{error.lineno}: {error.message}") from error
        except UnicodeDecodeError as error:
            raise RenderError(f"templates/{current}: not UTF-8: {error}") from error
        reserved = RESERVED.search(text)
        if reserved:
            line = text[: reserved.start()].count("\n") + 1
            raise RenderError(f"templates/{current}:{line}: control character U+{ord(reserved[0]):04X}; templates are plain text")
        for item in referenced:
            if item is None:
                raise RenderError(f"templates/{current}: included names must be written out, so that a change of theirs is seen")
            waiting.append((item, current))
    return dict(sorted(found.items()))
