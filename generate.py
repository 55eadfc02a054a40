"""Chat with DeepSeek-V4, to be read beside the vendor's generate.py and encoding_dsv4.py (Pro release).

This file knows people: prompts, tool calls, sampling and the chat program. Checkpoint files are convert.py's,
the mathematics is model.py's. Names, prompt texts and control tokens are the vendor's.

Deliberate differences from the vendor's encoding_dsv4.py:
- A prompt remembers which of its stretches are people's words (Marked): control tokens typed there stay text.
- Arguments of a call in the history may be an object as well as JSON text; null content is empty text.
- A conversation that nothing can answer is a ValueError that names the message; the vendor asserts.
- There are two tables of reasoning efforts, because Flash-0731 was trained with other texts: render_message
  and encode_messages take the one to use (efforts).
- A prompt is put together from marked parts. So there are no format strings for whole messages
  (system_msg_template, user_msg_template, latest_reminder_msg_template, assistant_msg_template,
  assistant_msg_wo_eos_template, thinking_template): render_message's helpers hold these texts.
- One StreamParser reads answers, whole or in pieces, in place of parse_tool_calls. It never raises: what is
  unambiguous is recovered, the rest is shown as it is and not run.
- A parsed message has two keys more: an id for each call, and error (None or one line).

Deliberate differences from the vendor's generate.py:
- load_model reads the published checkpoint; sample and generate also take top_p; temperature 0 is argmax
  everywhere. main takes the command line; the encoding is in this file (no current_dir, encoding_dir).
- The prompt is prefilled in chunks (memory, progress, Ctrl-C), and a chat computes only what is new.
- An answer streams, and one that the token limit cut is marked; the vendor ends it as if it were whole.
- Defaults: 4096 new tokens (the vendor: 300), a context of up to 16384 (4096), the temperature of
  generation_config.json (0.6).
"""

import argparse
import ast
import codecs
import contextlib
import json
import math
import os
import re
import selectors
import shlex
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import convert
from convert import readable

# torch and model are imported where they are used: wrong usage and missing files are found without that wait.
# torch's CPU threads must not spin long while they wait: beside another busy program that made decoding 40
# times slower. GNU's OpenMP reads this when torch is imported; others ignore it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

bos_token = "<｜begin▁of▁sentence｜>"
eos_token = "<｜end▁of▁sentence｜>"
thinking_start_token = "<think>"
thinking_end_token = "</think>"
dsml_token = "｜DSML｜"
USER_SP_TOKEN = "<｜User｜>"
ASSISTANT_SP_TOKEN = "<｜Assistant｜>"
LATEST_REMINDER_SP_TOKEN = "<｜latest_reminder｜>"
VALID_TASKS = ("action", "query", "authority", "domain", "title", "read_url")
DS_TASK_SP_TOKENS = {task: f"<｜{task}｜>" for task in VALID_TASKS}

response_format_template = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}")
tool_call_template = '<{dsml_token}invoke name="{name}">\n{arguments}\n</{dsml_token}invoke>'
tool_calls_template = "<{dsml_token}{tc_block_name}>\n{tool_calls}\n</{dsml_token}{tc_block_name}>"
tool_calls_block_name = "tool_calls"
p_dsml_template = '<{dsml_token}parameter name="{key}" string="{is_str}">{value}</{dsml_token}parameter>'
tool_output_template = "<tool_result>{content}</tool_result>"

TOOLS_TEMPLATE = (
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. "
    'You can invoke tools by writing a "<{dsml_token}tool_calls>" block like the following:\n\n'
    "<{dsml_token}tool_calls>\n"
    '<{dsml_token}invoke name="$TOOL_NAME">\n'
    '<{dsml_token}parameter name="$PARAMETER_NAME" string="true|false">'
    "$PARAMETER_VALUE</{dsml_token}parameter>\n"
    "...\n"
    "</{dsml_token}invoke>\n"
    '<{dsml_token}invoke name="$TOOL_NAME2">\n'
    "...\n"
    "</{dsml_token}invoke>\n"
    "</{dsml_token}tool_calls>\n\n"
    'String parameters should be specified as is and set `string="true"`. For all other types '
    '(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.\n\n'
    "If thinking_mode is enabled (triggered by {thinking_start_token}), you MUST output your complete "
    "reasoning inside {thinking_start_token}...{thinking_end_token} BEFORE any tool calls or final "
    "response.\n\n"
    "Otherwise, output directly after {thinking_end_token} with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n{tool_schemas}\n\n"
    "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n")

REASONING_EFFORT_MAX = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the "
    "root cause, rigorously stress-testing your logic against all potential paths, edge cases, and "
    "adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n")
REASONING_EFFORT_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively "
    "decompose the problem into its most fundamental components, trace every causal chain to its root, "
    "and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are "
    "certain that no assumption remains unchecked and no error remains undiscovered.\n\n")
# What an effort puts in front of a prompt in thinking mode: in the first releases, and in Flash-0731.
REASONING_EFFORTS = {"low": "", "high": "", "max": REASONING_EFFORT_MAX}
REASONING_EFFORTS_0731 = {"low": "", "high": REASONING_EFFORT_MAX, "max": REASONING_EFFORT_BEYOND}

ROUND_TRIPS = ("kv", "index", "hadamard", "act")    # model.ROUND_TRIPS, known here without importing torch
DEFAULT_CKPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tiny")
DEFAULT_CONTEXT = 16384     # tokens, where neither --max-seq-len nor a shorter checkpoint says otherwise
CACHE_GB = 2.0              # of plain weights, where --cache-gb does not say; only use fills it
MAX_BATCH = 4               # prompts at a time, as in the vendor's ModelArgs
PREFILL_CHUNK = 512         # a chat's ModelArgs.max_chunk: tokens that run through the layers at a time
KEPT_POINTS = 32            # points that a chat can go back to; one is some 20 MB for Flash
RANK_0_SECONDS = 10         # in which rank 0 says what every rank refuses
MAX_TOOL_ROUNDS = 16        # answers in a row that call tools, before the chat asks a person again
TOOL_SECONDS = 60
TOOL_BYTES = 1 << 20        # of a tool's output; a context holds less
MAX_NESTING = 200           # levels of JSON in a file; Python gives up at some 1000, wherever that may be
SAMPLING = {"temperature": (0, 1e6), "top_p": (1e-9, 1)}      # what is allowed, from and to
HISTORY_FILE = os.path.join(os.path.expanduser("~"), ".plain_v4_history")
SEED = 33377335             # the vendor's


# ------------------------------------------------------------------------------------------------------------
# Encoding: messages -> prompt
# ------------------------------------------------------------------------------------------------------------

class Marked(str):
    """Text that remembers which stretches of it are people's words: their (start, end) stand in `words`."""
    words: List[Tuple[int, int]]

    def __new__(cls, *parts: str):
        self = super().__new__(cls, "".join(parts))
        self.words, at = [], 0
        for part in parts:
            self.words += [(at + start, at + end) for start, end in getattr(part, "words", ())]
            at += len(part)
        return self


def words(text: str) -> Marked:
    """People's words. Halves of surrogate pairs, which JSON can smuggle in, are joined or replaced."""
    marked = Marked(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    marked.words = [(0, len(marked))]
    return marked


def fill(template: str, **values: str) -> Marked:
    """str.format for plain {names} that keeps the marks of the values."""
    parts = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts += [literal] if name is None else [literal, values[name]]
    return Marked(*parts)


def join(separator: str, parts: List[str]) -> Marked:
    return Marked(*[piece for part in parts for piece in (separator, part)][1:])


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def json_fits(value: Any, levels: int = MAX_NESTING) -> bool:
    """Whether a JSON value is nested no deeper than can be read and written anywhere."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(json_fits(item, levels - 1) for item in items)


def text_of(content: Any) -> str:
    """A message's content as text: a string, null, or a list of OpenAI content parts."""
    if isinstance(content, list):
        return "\n\n".join(part.get("text") or "" if part.get("type") == "text" else
                           f"[Unsupported {part.get('type')}]" for part in content)
    return content or ""


def tools_from_openai_format(tools: List[dict]) -> List[dict]:
    return [tool["function"] for tool in tools]


def tool_calls_from_openai_format(tool_calls: List[dict]) -> List[dict]:
    functions = [call["function"] for call in tool_calls]
    return [{"name": function["name"], "arguments": function.get("arguments")} for function in functions]


def tool_calls_to_openai_format(tool_calls: List[dict]) -> List[dict]:
    """The vendor's form, and an id for each call so that results can name the call they answer."""
    return [{"id": f"call_{i}", "type": "function", "function": call} for i, call in enumerate(tool_calls)]


def encode_arguments_to_dsml(tool_call: Dict[str, Any]) -> Marked:
    """The parameter lines of a call. What is no JSON object is one parameter, called arguments."""
    arguments = tool_call["arguments"] or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
            arguments = parsed if json_fits(parsed) else arguments
        except (ValueError, RecursionError):
            pass
    if not isinstance(arguments, dict):
        arguments = {"arguments": tool_call["arguments"]}
    return join("\n", [fill(p_dsml_template, dsml_token=dsml_token, key=words(key),
                            is_str="true" if isinstance(value, str) else "false",
                            value=words(value if isinstance(value, str) else to_json(value)))
                       for key, value in arguments.items()])


def decode_dsml_to_arguments(tool_name: str, tool_args: Dict[str, Tuple[str, str]]) -> Dict[str, str]:
    """{parameter: (value, "true" for a string or "false" for JSON)} -> the call, arguments as JSON text."""
    pairs = [f"{to_json(key)}: {to_json(value) if is_str == 'true' else value}"
             for key, (value, is_str) in tool_args.items()]
    return {"name": tool_name, "arguments": "{" + ", ".join(pairs) + "}"}


def render_tools(tools: List[dict]) -> Marked:
    return fill(TOOLS_TEMPLATE, dsml_token=dsml_token, thinking_start_token=thinking_start_token,
                thinking_end_token=thinking_end_token, tool_schemas=words("\n".join(map(to_json, tools))))


def find_last_user_index(messages: List[dict]) -> int:
    """Index of the last user or developer message, -1 without one."""
    return max((i for i, msg in enumerate(messages) if msg.get("role") in ("user", "developer")), default=-1)


def merge_tool_messages(messages: List[dict]) -> List[dict]:
    """The model knows no tool role: results go into the user turn after the call."""
    merged: List[dict] = []
    for msg in messages:
        if msg["role"] not in ("tool", "user"):
            merged.append(dict(msg))
            continue
        if msg["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": msg.get("tool_call_id"),
                     "content": msg.get("content")}
        else:
            block = {"type": "text", "text": text_of(msg.get("content"))}
        last = merged[-1] if merged else {}
        # a quick-instruction task ends its message, so text that follows opens a new one
        if last.get("role") == "user" and (msg["role"] == "tool" or last.get("task") is None):
            last["content_blocks"].append(block)
        else:
            kept = {"task", "wo_eos", "mask"} & set(msg) if msg["role"] == "user" else ()
            merged.append({"role": "user", "content_blocks": [block]} | {key: msg[key] for key in kept})
    return merged


def sort_tool_results_by_call_order(messages: List[dict]) -> List[dict]:
    """Results of several calls stand in the order of the calls, in whatever order they arrived."""
    order: Dict[str, int] = {}
    for msg in messages:
        if msg.get("role") == "assistant" and msg.get("tool_calls"):
            ids = [call.get("id") or call["function"].get("id") for call in msg["tool_calls"]]
            order = {call_id: i for i, call_id in enumerate(ids) if call_id}
        elif msg.get("role") == "user" and msg.get("content_blocks") and order:
            results = [block for block in msg["content_blocks"] if block["type"] == "tool_result"]
            results = iter(sorted(results, key=lambda block: order.get(block.get("tool_use_id"), 0)))
            msg["content_blocks"] = [next(results) if block["type"] == "tool_result" else block
                                     for block in msg["content_blocks"]]
    return messages


def _drop_thinking_messages(messages: List[dict]) -> List[dict]:
    """Before the last user turn: no reasoning, and no developer messages."""
    last_user, kept = find_last_user_index(messages), []
    for i, msg in enumerate(messages):
        if i >= last_user or msg["role"] in ("user", "system", "latest_reminder"):
            kept.append(msg)
        elif msg["role"] == "assistant":
            kept.append({key: value for key, value in msg.items() if key != "reasoning_content"})
    return kept


def check_messages(messages: List[dict]) -> None:
    """ValueError for what cannot be rendered; it names the message by its place, from 1."""
    for number, msg in enumerate(messages, 1):
        if not isinstance(msg, dict):
            raise ValueError(f"message {number} is no object with role and content: {msg!r}")
        role = msg.get("role")
        where = f"message {number} ({role})"
        if role not in ("system", "user", "assistant", "tool", "latest_reminder", "developer"):
            raise ValueError(f"message {number} has the unknown role {role!r}; there are system, user, "
                             "assistant, tool, latest_reminder and developer")
        for key in ("content", "reasoning_content"):
            parts = msg.get(key) if isinstance(msg.get(key), list) else [{"text": msg.get(key)}]
            if not all(isinstance(part, dict) and isinstance(part.get("text") or "", str) for part in parts):
                raise ValueError(f"{where}: {key} must be text, null or a list of parts, not {msg[key]!r}")
        if role == "developer" and not msg.get("content"):
            raise ValueError(f"{where} is empty")
        if msg.get("task") not in (None, *VALID_TASKS):
            raise ValueError(f"{where}: task {msg['task']!r} is none of {', '.join(VALID_TASKS)}")
        for key in ("tools", "tool_calls"):
            items = msg.get(key) or []
            if not isinstance(items, list) or not all(
                    isinstance(item, dict) and isinstance(item.get("function"), dict)
                    and isinstance(item["function"].get("name"), str) for item in items):
                raise ValueError(f"{where}: {key} must be a list in OpenAI form, of named functions")
        check_links(where, msg)


def check_links(where: str, msg: dict) -> None:
    """check_messages for what joins results to calls."""
    calls = msg.get("tool_calls") or []
    ids = [("id", part.get("id")) for call in calls for part in (call, call["function"])]
    for key, value in [*ids, ("tool_call_id", msg.get("tool_call_id"))]:
        if not isinstance(value, (str, int, type(None))):
            raise ValueError(f"{where}: {key} must be text, not {value!r}")
    blocks = msg.get("content_blocks") or []
    if not isinstance(blocks, list) or not all(
            isinstance(block, dict) and isinstance(block.get("type"), str) for block in blocks):
        raise ValueError(f"{where}: content_blocks must be a list of objects with a type, not {blocks!r}; "
                         "content is what is read")


def render_extras(msg: dict) -> Marked:
    """What a system or developer message carries beside its text: tools and the format of the answer."""
    parts = []
    if msg.get("tools"):
        parts += ["\n\n", render_tools(tools_from_openai_format(msg["tools"]))]
    if msg.get("response_format"):
        parts += ["\n\n", fill(response_format_template, schema=words(to_json(msg["response_format"])))]
    return Marked(*parts)


def render_user(msg: dict) -> Marked:
    """A user turn as merge_tool_messages leaves it: text and tool results."""
    return join("\n\n", [words(block["text"]) if block["type"] == "text" else
                         fill(tool_output_template, content=words(text_of(block["content"])))
                         for block in msg["content_blocks"]])


def render_assistant(msg: dict, with_thinking: bool) -> Marked:
    parts = [words(text_of(msg.get("reasoning_content"))), thinking_end_token] if with_thinking else []
    parts.append(words(text_of(msg.get("content"))))
    if msg.get("tool_calls"):
        calls = [fill(tool_call_template, dsml_token=dsml_token, name=words(call["name"]),
                      arguments=encode_arguments_to_dsml(call))
                 for call in tool_calls_from_openai_format(msg["tool_calls"])]
        parts += ["\n\n", fill(tool_calls_template, dsml_token=dsml_token, tool_calls=join("\n", calls),
                               tc_block_name=tool_calls_block_name)]
    return Marked(*parts, "" if msg.get("wo_eos") else eos_token)


def render_cue(index: int, messages: List[dict], thinking_mode: str, drop_thinking: bool) -> str:
    """The tokens after a message that say what the model writes next; none when people go on."""
    msg = messages[index]
    if index + 1 < len(messages) and messages[index + 1]["role"] not in ("assistant", "latest_reminder"):
        return ""
    task = msg.get("task")
    if task not in (None, "action"):
        return DS_TASK_SP_TOKENS[task]
    if task is None and msg["role"] not in ("user", "developer"):
        return ""
    thinks = thinking_mode == "thinking" and (
        task == "action" or not drop_thinking or index >= find_last_user_index(messages))
    return (ASSISTANT_SP_TOKEN + (thinking_start_token if thinks else thinking_end_token)
            + DS_TASK_SP_TOKENS.get(task, ""))


def render_message(index: int, messages: List[dict], thinking_mode: str, drop_thinking: bool = True,
                   reasoning_effort: Optional[str] = None,
                   efforts: Dict[str, str] = REASONING_EFFORTS) -> Marked:
    """One message (after merge_tool_messages), and the cue that follows it."""
    msg, parts = messages[index], []
    role = msg["role"]
    if index == 0 and thinking_mode == "thinking" and reasoning_effort is not None:
        parts.append(efforts[reasoning_effort])
    if role == "system":
        parts += [words(text_of(msg.get("content"))), render_extras(msg)]
    elif role == "developer":
        parts += [USER_SP_TOKEN, words(text_of(msg["content"])), render_extras(msg)]
    elif role == "user":
        parts += [USER_SP_TOKEN, render_user(msg)]
    elif role == "latest_reminder":
        parts += [LATEST_REMINDER_SP_TOKEN, words(text_of(msg.get("content")))]
    else:
        # the answer to a quick instruction comes without thinking
        after_task = index > 0 and messages[index - 1].get("task") is not None
        kept = not drop_thinking or index > find_last_user_index(messages)
        parts.append(render_assistant(msg, thinking_mode == "thinking" and not after_task and kept))
    return Marked(*parts, render_cue(index, messages, thinking_mode, drop_thinking))


def encode_messages(messages: List[dict], thinking_mode: str, context: Optional[List[dict]] = None,
                    drop_thinking: bool = True, add_default_bos_token: bool = True,
                    reasoning_effort: Optional[str] = None,
                    efforts: Dict[str, str] = REASONING_EFFORTS) -> str:
    """A conversation -> the model's prompt. `context` is what an earlier prompt holds; it is not repeated."""
    context = context or []
    if thinking_mode not in ("chat", "thinking"):
        raise ValueError(f"thinking_mode {thinking_mode!r} is neither chat nor thinking")
    # names that other programs put into conversations
    reasoning_effort = {"medium": "high", "xhigh": "max"}.get(reasoning_effort, reasoning_effort)
    if reasoning_effort not in (None, *efforts):
        raise ValueError(f"reasoning_effort {reasoning_effort!r} is none of {', '.join(efforts)}")
    check_messages(context + messages)
    if not messages:
        raise ValueError("there is no message to answer")

    n_context = len(merge_tool_messages(context))
    full = sort_tool_results_by_call_order(merge_tool_messages(context) + merge_tool_messages(messages))
    if full[-1]["role"] in ("system", "latest_reminder") and full[-1].get("task") is None:
        raise ValueError(f"message {len(context + messages)} ({full[-1]['role']}) comes last, where nothing "
                         "asks for an answer; end with a user message")
    # with tools a chain of calls needs the thoughts that led to it
    drop_thinking = drop_thinking and not any(msg.get("tools") for msg in full)
    if thinking_mode == "thinking" and drop_thinking:
        n_context = len(_drop_thinking_messages(full[:n_context]))
        full = _drop_thinking_messages(full)
    return Marked(bos_token if add_default_bos_token and not context else "",
                  *[render_message(i, full, thinking_mode, drop_thinking, reasoning_effort, efforts)
                    for i in range(n_context, len(full))])


def encode_prompt(tokenizer, prompt: str) -> List[int]:
    """Prompt -> token ids. A control token that people typed is cut in two, and no half is one."""
    is_words = bytearray(len(prompt))
    for start, end in getattr(prompt, "words", ()):
        is_words[start:end] = b"\1" * (end - start)
    cuts = {0, len(prompt)}
    for token in [added.content for added in tokenizer.get_added_tokens_decoder().values()]:
        at = prompt.find(token)
        while at >= 0:
            if len(token) > 1 and any(is_words[at:at + len(token)]):
                cuts.add(at + 1)
            at = prompt.find(token, at + 1)
    ordered = sorted(cuts)
    pieces = [prompt[start:end] for start, end in zip(ordered, ordered[1:])]
    return [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]


# ------------------------------------------------------------------------------------------------------------
# Parsing: answer -> message
# ------------------------------------------------------------------------------------------------------------

MAX_TAG = 512       # characters; what goes on longer is no tag, so that text is never held back for ever
TAG_BODY = re.compile(r"""<(?:[^"'<>]|"[^"]*"|'[^']*')*""")
TAG = re.compile(rf"""<\s*(/?)\s*{dsml_token}\s*(\w+)((?:\s+\w+\s*=\s*(?:"[^"]*"|'[^']*'))*)\s*>""")
ATTRIBUTE = re.compile(r"""(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")
OPEN_PARAMETER = re.compile(rf"<\s*{dsml_token}\s*parameter\b")
# What readers would take for a tool call gone wrong: any bars around DSML, or a tag begun at the very end.
LOOKALIKE = re.compile(r"<\s{0,9}/?[｜|\s]{0,9}DSML[｜|\s]{0,9}\w|"
                       r"<\s{0,9}/?\s{0,9}｜(?:D(?:S(?:M(?:L｜?)?)?)?)?\Z")


class Tag(NamedTuple):
    """One DSML tag: its name with a slash in front of a closing one, its attributes, its text."""
    name: str
    attributes: Optional[Dict[str, str]]        # None when one is given twice
    text: str


MORE = Tag("", None, "")      # more text is needed to tell


def read_tag(text: str) -> Optional[Tag]:
    """The DSML tag that text begins with, None when there is none, MORE when this depends on what follows."""
    window = text[:MAX_TAG]
    bare = re.sub(r"\s", "", window)
    heads = ("<" + dsml_token, "</" + dsml_token)
    if not bare.startswith(heads):
        return MORE if len(window) < MAX_TAG and any(head.startswith(bare) for head in heads) else None
    end = TAG_BODY.match(window).end()
    if window[end:end + 1] == ">":
        match = TAG.fullmatch(window[:end + 1])
        if not match:
            return None
        slash, name, attributes = match.groups()
        pairs = [(key, double or single) for key, double, single in ATTRIBUTE.findall(attributes)]
        return Tag(slash + name, dict(pairs) if len(dict(pairs)) == len(pairs) else None, match.group())
    if window[end:end + 1] in ("<", ">") or len(window) == MAX_TAG:
        return None
    return MORE


def fence_after(fence: str, line: str) -> str:
    """The mark of the code fence that is open after a line of Markdown, given the one before; "" for none."""
    match = re.match(r"[ \t]*(`{3,}|~{3,})", line)
    mark, rest = (match[1], line[match.end():]) if match else ("", line)
    if fence:
        return "" if mark.startswith(fence) and not rest.strip() else fence
    return mark if mark and mark[0] not in rest else ""


def outside_code(text: str) -> str:
    """Markdown text less its closed fences and inline code."""
    kept, fenced, fence = [], [], ""
    for line in text.split("\n"):
        before, fence = fence, fence_after(fence, line)
        if before and not fence:
            fenced = []
        else:
            (fenced if fence else kept).append(line)
    return re.sub(r"`[^`\n]+`", "", "\n".join(kept + fenced))


def json_value(text: str) -> Optional[str]:
    """A parameter's value as JSON text: as written, or respelled from a Python literal, or None."""
    def finite(number):     # JSON has neither NaN nor Infinity, which 1e999 would become
        if not math.isfinite(float(number)):
            raise ValueError(number)
    try:
        json.loads(text, parse_constant=finite, parse_float=finite)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # an odd escape in the literal is nobody's business
            return json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


class StreamParser:
    """An answer, fed in pieces: text is let out as soon as it cannot be part of a tag, calls at the end.

    Each state is a method that takes what it can from self.rest and returns whether another step may follow.
    No decision depends on where a piece ends, so cutting the text elsewhere cannot change the message."""

    def __init__(self, thinking_mode: str):
        self.channel = "reasoning" if thinking_mode == "thinking" else "content"
        self.text = {"reasoning": "", "content": ""}    # what has been let out
        # the length of its whole lines that are read, and the fence that is open after them
        self.fences = {"reasoning": (0, ""), "content": (0, "")}
        self.rest = ""                                  # what is still to be read
        self.state: Callable[[], bool] = self._text
        self.at_end = False                             # no more text will come
        self.error: Optional[str] = None
        self.unexpected: Optional[int] = None           # where the content has no tag but should
        self.drafted = False                            # the reasoning has a broken block, so it has no call
        self.shown: List[Tuple[str, str]] = []
        self._forget_block()

    def feed(self, piece: str) -> List[Tuple[str, str]]:
        """Read on; returns what may be shown now as (channel, text)."""
        self.shown = []
        self.rest += piece
        while self.state():
            pass
        return self.shown

    def close(self) -> Dict[str, Any]:
        """The message. Its texts begin with all that feed returned and may go on with what was held back."""
        self.at_end = True
        self.feed("")
        reasoning, content, error = self.text["reasoning"], self.text["content"], self.error
        if error and self.unexpected is not None:
            found = content[self.unexpected:]
            error += ("the answer ends inside it" if read_tag(found) is MORE else
                      f"unexpected {found[:20]!r} between its tags")
        elif not error and self.channel == "reasoning" and not self.calls:
            error = "the answer ended inside the reasoning, without " + thinking_end_token
        elif not error and self.rest.replace(eos_token, "").strip():
            error = "text after the end of the message was left out"
        elif not error and LOOKALIKE.search(outside_code(content)):
            error = "this looks like a tool call but is not written as one; nothing was run"
        elif not (error or content.strip() or self.calls) and LOOKALIKE.search(reasoning):
            error = "a tool call inside the reasoning is not run"
        if error and self.block:
            self._show(self.block)      # what does not run is shown
            self._forget_block()
        return {"role": "assistant", "content": self.text["content"],
                "reasoning_content": self.text["reasoning"],
                "tool_calls": tool_calls_to_openai_format(self.calls), "error": error}

    # ---- states ----

    def _text(self) -> bool:
        """Reasoning or content: let out everything before the next place where a tag could begin."""
        # up to two newlines before a block belong to the block
        stop = re.search(r"\n{0,2}<|\n{1,2}\Z", self.rest)
        self._show(self._take(stop.start() if stop else len(self.rest)))
        body = self.rest.lstrip("\n")
        if not body:
            if self.at_end:
                self._show(self._take(len(self.rest)))
            return False
        newlines = self.rest[:len(self.rest) - len(body)]
        for token in (eos_token, thinking_end_token) if self.channel == "reasoning" else (eos_token,):
            if body.startswith(token):
                self._show(newlines)
                self._take(len(newlines + token))
                if token == eos_token:
                    self.state = self._done
                else:
                    self.channel = "content"
                return True
            if token.startswith(body) and not self.at_end:
                return False
        tag = self._read_tag(body)
        if tag is MORE:
            return False
        if tag and tag.name == tool_calls_block_name and not tag.attributes and self._may_call(newlines):
            self.block = self._take(len(newlines + tag.text))
            self.state = self._calls
        else:
            self._show(self._take(len(newlines) + 1))
        return True

    def _calls(self) -> bool:
        """Inside a block, between calls."""
        tag = self._next_tag()
        if tag is None:
            return not self.block       # given up: read on as text
        attributes = tag.attributes or {}
        if tag.name == "invoke" and set(attributes) == {"name"} and attributes["name"]:
            self.name, self.arguments = attributes["name"], {}
            self.state = self._arguments
        elif tag.name == "/" + tool_calls_block_name and self.calls:
            self.state = self._after
        else:
            return self._give_up(f"{tag.text!r} where a call should stand")
        return True

    def _arguments(self) -> bool:
        """Inside a call, between parameters. A call without an end tag ends with the next or the block."""
        tag = self._next_tag()
        if tag is None:
            return not self.block       # given up: read on as text
        if tag.name == "parameter":
            attributes = tag.attributes or {}
            self.key, self.is_str = attributes.get("name"), attributes.get("string", "").lower()
            if set(attributes) != {"name", "string"} or self.is_str not in ("true", "false"):
                return self._give_up(f"{tag.text!r} of {self.name!r} lacks a name or string=true or false")
            if self.key in self.arguments:
                return self._give_up(f"call {self.name!r} has duplicate parameter {self.key!r}")
            self.value = ""
            self.state = self._value
            return True
        if tag.name not in ("/invoke", "invoke", "/" + tool_calls_block_name):
            return self._give_up(f"call {self.name!r} has {tag.text!r} where a parameter should stand")
        self.calls.append(decode_dsml_to_arguments(self.name, self.arguments))
        self.state = self._calls
        if tag.name != "/invoke":       # read it again, as what follows the call
            self.rest, self.block = tag.text + self.rest, self.block[:-len(tag.text)]
        return True

    def _value(self) -> bool:
        """Inside a parameter: every byte up to the end tag is the value."""
        stop = self.rest.find("<")
        self.value += self._take_block(stop if stop >= 0 else len(self.rest))
        if not self.rest:
            return self.at_end and self._give_up(f"parameter {self.key!r} of {self.name!r} is never closed")
        tag = self._read_tag(self.rest)
        if tag is MORE:
            return False
        if not tag or tag.name != "/parameter":
            self.value += self._take_block(1)
            return True
        self._take_block(len(tag.text))
        if OPEN_PARAMETER.search(self.value):
            return self._give_up(f"parameter {self.key!r} of {self.name!r} is not closed before the next one")
        value = self.value if self.is_str == "true" else json_value(self.value)
        if value is None:
            return self._give_up(f"parameter {self.key!r} of {self.name!r} is not valid JSON")
        self.arguments[self.key] = (value, self.is_str)
        self.state = self._arguments
        return True

    def _after(self) -> bool:
        """After a whole block: it counts when the turn ends here, or when another block follows."""
        self._take_block(len(self.rest) - len(self.rest.lstrip()))
        if not self.rest or eos_token.startswith(self.rest) and not self.at_end:
            return False
        if self.rest.startswith(eos_token):
            self._take(len(eos_token))
            self.state = self._done
            return True
        tag = self._read_tag(self.rest)
        if tag is MORE:
            return False
        if tag and tag.name == tool_calls_block_name and not tag.attributes:
            self._take_block(len(tag.text))
            self.state = self._calls
            return True
        if self.channel == "content":
            self.error = "text follows the tool calls, so they were not run"
        self._show(self.block)      # in the reasoning: a draft, quoted
        self._forget_block()
        self.state = self._text
        return True

    def _done(self) -> bool:
        return False

    # ---- what the states share ----

    def _take(self, n: int) -> str:
        taken, self.rest = self.rest[:n], self.rest[n:]
        return taken

    def _take_block(self, n: int) -> str:
        taken = self._take(n)
        self.block += taken
        return taken

    def _show(self, text: str) -> None:
        if text:
            self.text[self.channel] += text
            self.shown.append((self.channel, text))

    def _may_call(self, newlines: str) -> bool:
        """No call is read out of code, after a mistake, or out of reasoning that quoted a broken block."""
        drafted = self.drafted and self.channel == "reasoning"
        quoted = not newlines and self.text[self.channel].endswith("`")
        return not (self.error or drafted or quoted or self._in_fence(newlines))

    def _in_fence(self, newlines: str) -> bool:
        """Whether a code fence is open after the text and newlines. Each whole line is read only once."""
        text, (start, fence) = self.text[self.channel], self.fences[self.channel]
        end = text.rfind("\n") + 1
        for line in text[start:end].split("\n")[:-1]:
            fence = fence_after(fence, line)
        self.fences[self.channel] = end, fence
        for line in (text[end:] + newlines).split("\n"):
            fence = fence_after(fence, line)
        return bool(fence)

    def _read_tag(self, text: str) -> Optional[Tag]:
        """read_tag; at the end of the answer nothing more can make a tag of the text."""
        tag = read_tag(text)
        return None if tag is MORE and self.at_end else tag

    def _next_tag(self) -> Optional[Tag]:
        """The next tag in a block, white space skipped. None: it is not whole, or the block was given up."""
        body = self.rest.lstrip()
        tag = self._read_tag(body)
        if tag is MORE:
            return None
        if tag:
            self._take_block(len(self.rest) - len(body) + len(tag.text))
        else:
            # what stands there is known at the end: how much of it is here now depends on the pieces
            self._give_up("", len(self.text[self.channel] + self.block) + len(self.rest) - len(body))
        return tag

    def _give_up(self, reason: str, unexpected: Optional[int] = None) -> bool:
        """This is no block: its first character is text, and what follows is read again as text."""
        begun = self.block
        if re.search(rf"{dsml_token}\s*invoke", begun):
            self.drafted = True
            if self.channel == "content":
                self.error, self.unexpected = "malformed tool call, nothing was run: " + reason, unexpected
        self._forget_block()
        self.rest = begun + self.rest
        n = len(begun) - len(begun.lstrip("\n")) + 1
        self._show(self._take(n))
        self.state = self._text
        return True

    def _forget_block(self) -> None:
        self.block, self.calls = "", []
        self.name, self.arguments, self.key, self.is_str, self.value = "", {}, "", "", ""


def parse_message_from_completion_text(text: str, thinking_mode: str) -> Dict[str, Any]:
    """A whole answer -> message. The end-of-sentence token may be missing."""
    parser = StreamParser(thinking_mode)
    for start in range(0, len(text), 4096):     # short pieces: a parser copies what it has not read yet
        parser.feed(text[start:start + 4096])
    return parser.close()


# ------------------------------------------------------------------------------------------------------------
# Sampling and generation
# ------------------------------------------------------------------------------------------------------------

def sample(logits, temperature: float = 1.0, top_p: float = 1.0):
    """Logits [b,vocab] -> token ids [b]. Gumbel-max: exponential noise needs no trip to the CPU."""
    import torch
    if temperature <= 0:
        return logits.argmax(dim=-1)
    probs = torch.softmax(logits / max(temperature, 1e-5), dim=-1, dtype=torch.float32)
    if top_p < 1:
        # the nucleus: the likeliest tokens, until those before a token make up top_p
        ordered, order = probs.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= top_p
        beyond[..., 0] = False      # the likeliest always stays
        ordered[beyond] = 0
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
    noise = torch.empty_like(probs).exponential_()
    return (probs / noise).argmax(dim=-1)


def sample_on_all_ranks(logits, temperature: float, top_p: float):
    """sample, with rank 0's choice on every rank: ranks that disagree would wait for each other for ever."""
    import torch.distributed as dist
    tokens = sample(logits, temperature, top_p)
    if dist.is_initialized():
        dist.broadcast(tokens, 0)
    return tokens.cpu()


def generate(model, prompt_tokens: List[List[int]], max_new_tokens: int, eos_id: int,
             temperature: float = 1.0, top_p: float = 1.0) -> List[List[int]]:
    """A batch of prompts -> their completions, which always end with eos_id, also where the limit cut them.

    As in the vendor's: prefill up to the shortest prompt's end, then token by token, where what a longer
    prompt says takes the place of what the model would say."""
    import torch
    prompt_lens = [len(prompt) for prompt in prompt_tokens]
    check_prompts(model, prompt_tokens)
    total_len = min(model.max_seq_len, max_new_tokens + max(prompt_lens))
    tokens = torch.full((len(prompt_tokens), total_len), -1, dtype=torch.long)      # [b,total]
    for i, prompt in enumerate(prompt_tokens):
        tokens[i, :len(prompt)] = torch.tensor(prompt)
    prompt_mask = tokens != -1
    finished = torch.zeros(len(prompt_tokens), dtype=torch.bool)
    prev_pos = 0
    for cur_pos in range(min(prompt_lens), total_len):
        for start in range(prev_pos, cur_pos, model.args.max_chunk):
            with torch.inference_mode():
                logits = model.forward(tokens[:, start:min(start + model.args.max_chunk, cur_pos)], start)
        next_token = sample_on_all_ranks(logits, temperature, top_p)
        next_token = torch.where(prompt_mask[:, cur_pos], tokens[:, cur_pos], next_token)
        tokens[:, cur_pos] = next_token
        finished |= ~prompt_mask[:, cur_pos] & (next_token == eos_id)
        prev_pos = cur_pos
        if finished.all():
            break
    completions = []
    for row, length in zip(tokens.tolist(), prompt_lens):
        completion = row[length:length + max_new_tokens]
        completions.append(completion[:completion.index(eos_id) if eos_id in completion else None] + [eos_id])
    return completions


def check_prompts(model, prompt_tokens: List[List[int]]) -> None:
    """ValueError for prompts that the model cannot take."""
    if not prompt_tokens or not all(prompt_tokens):
        raise ValueError("a prompt is empty: it needs one token at least")
    if len(prompt_tokens) > model.max_batch_size:
        raise ValueError(f"{len(prompt_tokens)} prompts at a time, of {model.max_batch_size} planned for")
    for prompt in prompt_tokens:
        if len(prompt) > model.max_seq_len:
            raise ValueError(f"the prompt has {len(prompt)} tokens, but max_seq_len is {model.max_seq_len}: "
                             "shorten it, or give a larger --max-seq-len")
        if min(prompt) < 0 or max(prompt) >= model.vocab_size:
            bad = next(token for token in prompt if not 0 <= token < model.vocab_size)
            raise ValueError(f"token id {bad} is outside the vocabulary of {model.vocab_size}: the tokenizer "
                             "is not this checkpoint's")


@dataclass
class Statistics:
    """What one answer took."""
    prefilled: int = 0
    reused: int = 0
    prefill_s: float = 0.0
    decoded: int = 0
    decode_s: float = 0.0

    def __str__(self) -> str:
        reused = f" ({self.reused} reused)" if self.reused else ""
        return (f"prefill {self.prefilled} tok{reused} {self.prefill_s:.1f} s "
                f"({self.prefilled / max(self.prefill_s, 1e-9):.0f} tok/s) · decode {self.decoded} tok "
                f"({self.decoded / max(self.decode_s, 1e-9):.1f} tok/s){peak_memory()}")


def peak_memory() -> str:
    import torch
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        try:
            import resource
        except ImportError:     # not on Windows
            return ""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f" · peak {peak / 1e9:.1f} GB"


def cache_use(model) -> str:
    """How full the cache of weights is, or that of experts on the device; empty where there is none."""
    import kernel
    copies = model.layers[0].ffn.copies if hasattr(model, "layers") else None
    cache = copies or kernel.weight_cache
    if not cache.limit:
        return ""
    found = 100 * cache.hits / max(cache.calls, 1)
    return f" · weights kept {readable(cache.size())} of {readable(cache.limit)}, {found:.0f}% found there"


class Session:
    """What the model holds, and points to go back to: a turn computes only what is new."""

    def __init__(self, model):
        self.model = model
        self.tokens: List[int] = []                 # behind the model's state
        self.kept: List[Tuple[int, Any]] = []       # (position, snapshot), in order
        self.whole = True                           # no pass was broken off
        self.stats = Statistics()
        self.cut = False                            # the last answer ended at the limit

    def stream(self, prompt: List[int], max_new_tokens: int, eos_id: int, temperature: float, top_p: float,
               progress: Callable[[int, int, float], None] = lambda *_: None) -> Iterator[int]:
        """The answer's tokens without the eos_id that ends it; on every rank at the same time.

        `progress(done, total, seconds)` hears of the prefill."""
        started = time.monotonic()
        reused = self._rewind(prompt)
        self.stats = Statistics(len(prompt) - reused, reused)
        chunk = self.model.args.max_chunk       # between two of them come progress and Ctrl-C
        # Before the last token, <think> or </think>, is where /regen and turns without old thoughts start.
        for start in range(reused, len(prompt) - 1, chunk):
            self._forward(prompt[start:min(start + chunk, len(prompt) - 1)])
            progress(len(self.tokens) - reused, len(prompt) - reused, time.monotonic() - started)
        self._keep()
        logits = self._forward(prompt[-1:])
        self.stats.prefill_s = time.monotonic() - started
        room = min(max_new_tokens, self.model.max_seq_len - len(prompt))
        self.cut = True
        for left in reversed(range(room)):
            token = int(sample_on_all_ranks(logits, temperature, top_p)[0])
            self.stats.decoded += 1
            self.stats.decode_s = time.monotonic() - started - self.stats.prefill_s
            if token == eos_id:
                self.cut = False
                break
            yield token
            if left:
                logits = self._forward([token])
        self._keep()

    def _rewind(self, prompt: List[int]) -> int:
        """Back to the last kept point that prompt shares with what is held; returns its position."""
        shared = next((i for i, (a, b) in enumerate(zip(prompt, self.tokens)) if a != b),
                      min(len(prompt), len(self.tokens)))
        shared = min(shared, len(prompt) - 1)       # the last token's logits are needed
        if self.whole and len(self.tokens) <= shared:
            return len(self.tokens)
        self.whole = False
        while self.kept and self.kept[-1][0] > shared:
            self.kept.pop()
        position, state = self.kept[-1] if self.kept else (0, None)
        if state is not None:
            self.model.restore(state)
        del self.tokens[position:]
        self.whole = True
        return position

    def _forward(self, tokens: List[int]):
        import torch
        self.whole = False      # until the pass is through: Ctrl-C can break it off anywhere
        with torch.inference_mode():
            logits = self.model.forward(torch.tensor([tokens]), len(self.tokens))
        self.tokens += tokens
        self.whole = True
        return logits

    def _keep(self) -> None:
        """Make this a point to go back to; the oldest one is dropped when there are many."""
        if self.tokens and not (self.kept and self.kept[-1][0] == len(self.tokens)):
            self.kept = self.kept[1 - KEPT_POINTS:] + [(len(self.tokens), self.model.snapshot())]


class TokenText:
    """Token ids -> text in whole characters: a character's first bytes wait for its last ones."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.added = {i: t.content.encode() for i, t in tokenizer.get_added_tokens_decoder().items()}
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The byte-level alphabet: printable bytes stand for themselves, the others for 256 and up.
        plain = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
        others = [byte for byte in range(256) if byte not in plain]
        self.bytes = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}

    def push(self, token: int) -> str:
        """The characters that are whole with this token."""
        data = self.added.get(token)
        if data is None:
            chars = self.tokenizer.id_to_token(token) or ""     # a vocabulary may have rows that mean nothing
            data = bytes(self.bytes[char] for char in chars if char in self.bytes)
        return self.decoder.decode(data)


# ------------------------------------------------------------------------------------------------------------
# Loading
# ------------------------------------------------------------------------------------------------------------

def load_tokenizer(ckpt_path: str):
    """The folder's tokenizer.json and no other (a wrong one would give fluent nonsense), or None."""
    from tokenizers import Tokenizer
    path = os.path.join(ckpt_path, "tokenizer.json")
    if not os.path.exists(path):
        return None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:      # the library raises plain Exception
        raise ValueError(f"{path} cannot be read ({error}): copy it again") from None


def check_checkpoint(ckpt_path: str, config: Optional[str]) -> convert.Tensors:
    """Where each tensor lies; ValueError when files are missing or cut. Reads headers only."""
    default_context(config_of(ckpt_path, config))
    return convert.read_checkpoint(ckpt_path, rank(), world_size())


def config_of(ckpt_path: str, config: Optional[str]) -> dict:
    """The file of --config when one is given, else the folder's config.json."""
    own = convert.read_config(ckpt_path, required=config is None)
    if config is None:
        return own
    given = read_json(config, "--config")
    if not isinstance(given, dict):
        raise ValueError(f"--config {config}: it holds no JSON object; give a checkpoint's config.json")
    return given


def default_context(config: dict) -> int:
    """max_seq_len where nobody chose one."""
    longest = config.get("max_position_embeddings")
    if longest is None:
        return DEFAULT_CONTEXT
    if type(longest) is not int or longest < 1:     # True is an int, too
        raise ValueError(f"the config's max_position_embeddings is {longest!r}, no positive whole number: "
                         "correct it, or copy config.json again")
    return min(DEFAULT_CONTEXT, longest)


def cache_of(cache_gb: Optional[float], device_gb: Optional[float], device: Optional[str]) -> float:
    """GB of plain weights that are kept; ValueError for a limit on nothing. device None: there is no GPU."""
    for name, value in (("cache_gb", cache_gb), ("device_gb", device_gb)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}: give a number of GB, 0 or more")
    on_gpu = device is not None and not str(device).startswith("cpu")
    if device_gb is not None and device is None:
        raise ValueError("--device-gb limits the copies of experts on a GPU, and there is no GPU: leave it "
                         "out; of mapped files only the experts that are used take memory")
    if cache_gb and (on_gpu or device_gb is not None):
        raise ValueError("--cache-gb keeps plain numbers for a CPU's products, and a GPU multiplies weights "
                         "as they are stored: leave it out")
    if cache_gb is None:
        return 0 if on_gpu or device_gb is not None else CACHE_GB
    return cache_gb


def load_model(ckpt_path: str, config: Optional[str] = None, device: Optional[str] = None, dtype=None,
               max_seq_len: Optional[int] = None, round_trips: Tuple[str, ...] = ROUND_TRIPS,
               max_batch_size: int = MAX_BATCH, max_chunk: Optional[int] = None,
               progress: Optional[Callable[[int, int], None]] = None, cache_gb: Optional[float] = None,
               device_gb: Optional[float] = None, tensors: Optional[convert.Tensors] = None):
    """-> (model, tokenizer). dtype=torch.float32 with round_trips=() is the exact mode. Ranks: torchrun's.

    cache_gb, device_gb: as --cache-gb and --device-gb say; device="cpu" can play the GPU of device_gb.
    tensors: what check_checkpoint returned."""
    import torch
    import torch.distributed as dist
    import kernel
    from model import ModelArgs, Transformer
    cache_gb = cache_of(cache_gb, device_gb, device or ("cuda" if torch.cuda.is_available() else None))
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        local_rank = from_torchrun("LOCAL_RANK", 0)
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    if world_size() > 1 and not dist.is_initialized():
        # ranks wait for what a person types: longer than the half hour that is the default
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=7))
    settings = config_of(ckpt_path, config)
    if max_seq_len is None:
        max_seq_len = default_context(settings)
    max_chunk = ModelArgs.max_chunk if max_chunk is None else min(max_chunk, max_seq_len)
    # the MTP block drafts tokens for a speculative decoder, which this is not
    args = ModelArgs.from_config(settings, max_seq_len=max_seq_len, max_batch_size=max_batch_size,
                                 max_chunk=max_chunk, n_mtp_layers=0)
    convert.check_parallel(settings, world_size())
    with torch.device("meta"):
        model = Transformer(args, dtype=dtype or torch.bfloat16, round_trips=tuple(round_trips))
    convert.load_weights(model, ckpt_path, device, progress, tensors=tensors,
                         expert_device=None if device_gb is None else "cpu")
    if device_gb is not None:
        model.copy_experts(round(device_gb * 1e9))
    model.reset_caches(device)
    kernel.weight_cache.resize(round(cache_gb * 1e9))
    tokenizer = load_tokenizer(ckpt_path)
    if tokenizer is None:
        warnings.warn(f"{ckpt_path} has no tokenizer.json: token ids go in and come out, text does not")
    return model.eval(), tokenizer


# ------------------------------------------------------------------------------------------------------------
# The program
# ------------------------------------------------------------------------------------------------------------

HELP = {
    "/help": "this list",
    "/clear": "forget the conversation",
    "/think [low|high|max]": "think before answering, with the given effort",
    "/nothink": "answer at once",
    "/regen": "take the last answer back and make another one",
    "/tools [on|off]": "list the tools, or switch them",
    "/stats": "what the last answer took, and how full the context is",
    "/exit": "leave; so does Ctrl-D",
    '"""': "opens and closes a message of several lines",
}


@dataclass
class Settings:
    """What a chat was asked to be."""
    max_new_tokens: int = 4096
    temperature: float = 1.0
    top_p: float = 1.0
    thinking_mode: str = "chat"
    reasoning_effort: Optional[str] = None
    efforts: Dict[str, str] = field(default_factory=lambda: REASONING_EFFORTS)
    system: str = ""
    tools: Optional[List[dict]] = None
    tool_exec: Optional[List[str]] = None       # a program and its arguments
    hide_thinking: bool = False
    quiet: bool = False


def visible(text: str) -> str:
    """Text with control characters made visible: a terminal would obey them."""
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]",
                  lambda control: chr(0x2400 + ord(control[0])) if control[0] < " " else "␡", text)


class Screen:
    """The answer goes to stdout, all else to stderr: the thoughts in grey, notes, progress."""

    def __init__(self, quiet: bool = False, hide_thinking: bool = False):
        self.quiet, self.hide_thinking = quiet, hide_thinking
        self.tty = sys.stderr.isatty()
        self.colour = self.tty and not os.getenv("NO_COLOR") and os.getenv("TERM") != "dumb"
        self.stream = None          # what the open line was written to; None at the beginning of a line
        self.grey = False
        self.bar = 0                # width of the progress line
        self.drawn = time.monotonic()

    def show(self, channel: str, text: str) -> None:
        """A piece of the answer."""
        if channel == "reasoning" and self.hide_thinking:
            self.progress("thinking ...")
            return
        if not text:
            return
        self.progress("")
        stream = sys.stderr if channel == "reasoning" else sys.stdout
        if self.stream is not stream:
            self.end_line()
        if stream is sys.stderr and self.colour and not self.grey:
            stream.write("\x1b[90m")
            self.grey = True
        stream.write(visible(text) if stream.isatty() else text)
        stream.flush()
        self.stream = None if text.endswith("\n") else stream

    def end_line(self) -> None:
        if self.grey:
            sys.stderr.write("\x1b[0m")
            self.grey = False
        if self.stream is not None:
            self.stream.write("\n")
            self.stream.flush()
            self.stream = None

    def note(self, text: str) -> None:
        """A line of ours."""
        self.end_line()
        self.progress("")
        print(visible(text), file=sys.stderr, flush=True)

    def progress(self, text: str) -> None:
        """A line that the next one overwrites; on a terminal only. An empty one removes it."""
        now = time.monotonic()
        if self.tty and not self.quiet and (now > self.drawn + 0.1 if text else self.bar):
            sys.stderr.write("\r" + text.ljust(self.bar) + ("" if text else "\r"))
            sys.stderr.flush()
            self.bar, self.drawn = len(text), now


def run_tool(command: List[str], call: dict) -> str:
    """A program gets the call as JSON on stdin; its stdout is the result. The model is told what fails."""
    name = call["function"]["name"]
    try:
        arguments = json.loads(call["function"]["arguments"])
        request = to_json({"id": call["id"], "name": name, "arguments": arguments}) + "\n"
    except RecursionError:
        return f"error: the arguments of {name} are nested too deeply"
    try:
        with tempfile.TemporaryFile() as file:      # not a pipe, which waits until the program reads it
            file.write(request.encode("utf-8", "replace"))
            file.seek(0)
            # a session of its own, so that a time limit or Ctrl-C ends its children as well
            process = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       start_new_session=True)
    except OSError as error:
        return f"error: {command[0]} cannot be started: {error.strerror}"
    with process.stdout, process.stderr:    # closed in the end, also where a descendant keeps them open
        try:
            out, err = tool_output(process)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            if isinstance(error, subprocess.TimeoutExpired):
                return f"error: no result within {TOOL_SECONDS} seconds"
            if isinstance(error, OverflowError):
                return f"error: more than {TOOL_BYTES >> 20} MB of output"
            raise
    if process.returncode:
        detail = err.decode("utf-8", "replace").strip()[-500:]
        return f"error: exit status {process.returncode}" + (f": {detail}" if detail else "")
    return out.decode("utf-8", "replace").removesuffix("\n")


def tool_output(process: subprocess.Popen) -> Tuple[bytes, bytes]:
    """stdout and the end of stderr; TimeoutExpired when they or the process do not end, OverflowError."""
    end = time.monotonic() + TOOL_SECONDS
    out, err = bytearray(), bytearray()
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ, out)
        waiting.register(process.stderr, selectors.EVENT_READ, err)
        while waiting.get_map():
            left = end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(process.args, TOOL_SECONDS)
            for key, _ in waiting.select(left):
                data = os.read(key.fd, 65536)
                key.data.extend(data)
                if not data:
                    waiting.unregister(key.fileobj)
            if len(out) > TOOL_BYTES:
                raise OverflowError
            del err[:-4096]
    process.wait(max(end - time.monotonic(), 0))
    return bytes(out), bytes(err)


class Chat:
    """A conversation: what was said, the model, and the person at the other end."""

    def __init__(self, model, tokenizer, settings: Settings):
        self.session, self.tokenizer, self.settings = Session(model), tokenizer, settings
        self.screen = Screen(settings.quiet, settings.hide_thinking)
        self.eos_id = tokenizer.token_to_id(eos_token)
        self.tools_on = True
        self.interactive = False
        self.messages: List[dict] = []

    def opening(self, messages: List[dict]) -> List[dict]:
        """messages with the system text and the tools in front."""
        settings, tools = self.settings, self.settings.tools if self.tools_on else None
        if settings.system:
            messages = [{"role": "system", "content": settings.system}] + messages
        return with_tools(messages, tools)

    def complete(self, messages: List[dict]) -> Tuple[dict, str]:
        """One answer, shown as it is made -> (message, how it ended: "end", "cut" or "interrupt")."""
        settings, screen = self.settings, self.screen
        prompt = prompt_of(messages, settings)
        tokens = encode_prompt(self.tokenizer, prompt)
        limit = self.session.model.max_seq_len
        if len(tokens) >= limit:
            raise ValueError(f"the prompt has {len(tokens)} tokens, the context holds {limit} with an answer:"
                             f" {'/clear, or ' if self.interactive else ''}start with a larger --max-seq-len")
        check_prompts(self.session.model, [tokens])
        job = (tokens, settings.max_new_tokens, self.eos_id, settings.temperature, settings.top_p)
        share(job)
        parser = StreamParser("thinking" if prompt.endswith(thinking_start_token) else "chat")
        text, how = TokenText(self.tokenizer), "end"
        try:
            for token in self.session.stream(*job, progress=self._prefill_progress):
                for channel, piece in parser.feed(text.push(token)):
                    screen.show(channel, piece)
            how = "cut" if self.session.cut else "end"
        except KeyboardInterrupt:
            screen.progress("")
            if world_size() > 1:
                raise       # torchrun ends all ranks, whatever they do
            how = "interrupt"
        shown = dict(parser.text)
        message = parser.close()
        if how == "interrupt":      # what was said counts, what was held back does not
            message.update(content=shown["content"], reasoning_content=shown["reasoning"], tool_calls=[],
                           error=None)
        screen.show("reasoning", message["reasoning_content"][len(shown["reasoning"]):])
        screen.show("content", message["content"][len(shown["content"]):])
        screen.end_line()
        self._tell(message, how)
        return message, how

    def _prefill_progress(self, done: int, total: int, seconds: float) -> None:
        self.screen.progress("" if done >= total - 1 else
                             f"prefill {done} of {total} tok ({done / max(seconds, 1e-9):.0f} tok/s)")

    def _tell(self, message: dict, how: str) -> None:
        """The notes that follow an answer."""
        note, said = self.screen.note, message["content"] or message["tool_calls"]
        if how == "cut":
            full = len(self.session.tokens) + 1 >= self.session.model.max_seq_len
            note("[cut: the context is full; /clear, or start with a larger --max-seq-len]" if full else
                 f"[cut after {self.settings.max_new_tokens} tokens; --max-new-tokens allows more]")
        if how == "interrupt":
            note("[stopped]")
        if message["error"]:
            note(f"[{message['error']}]")
        elif how == "end" and not said:
            note("[the answer is empty]")
        if not self.settings.quiet:
            note(str(self.session.stats))

    def answer(self, messages: List[dict]) -> Tuple[dict, str]:
        """Answers and results of calls, appended to messages, until an answer calls nothing.

        -> the last answer and how it ended, as complete says; "rounds" when calls did not come to an end."""
        for _ in range(MAX_TOOL_ROUNDS):
            message, how = self.complete(messages)
            messages.append(message)
            if not message["tool_calls"] or not (self.interactive or self.settings.tool_exec):
                return message, how
            for call in message["tool_calls"]:
                result = self.result_of(call, messages)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        self.screen.note(f"[stopped: {MAX_TOOL_ROUNDS} answers in a row called tools]")
        return message, "rounds"

    def result_of(self, call: dict, messages: List[dict]) -> str:
        """Run a call of a tool that messages declare, or ask the person for its result."""
        name = call["function"]["name"]
        self.screen.note(f"{name} {call['function']['arguments']}")
        declared = [tool["function"]["name"] for message in messages for tool in message.get("tools") or []]
        if name not in declared and (declared or self.settings.tool_exec):      # people may make one up
            result = f"error: there is no tool {name}; there are {', '.join(declared) or 'none'}"
        elif self.settings.tool_exec:
            result = run_tool(self.settings.tool_exec, call)
        else:
            return self.read(f"result of {visible(name)}: ")
        self.screen.note("-> " + (result if len(result) <= 200 else result[:200] + " ..."))
        return result

    # ---- the person ----

    def read(self, prompt: str) -> str:
        """What the person types: a line, or several between triple quotes."""
        text = self._read_line(prompt)
        if not text.startswith('"""'):
            return text
        text = text[3:]
        while not text.rstrip().endswith('"""'):
            text += "\n" + self._read_line("... ")
        return text.rstrip()[:-3].strip("\n")

    def _read_line(self, prompt: str) -> str:
        """input() edits lines and keeps a history, and needs a terminal on both ends for that."""
        if sys.stdin.isatty() and sys.stdout.isatty():
            # torchrun ends all ranks when one has died: an exception, for input to put the terminal right
            before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            try:
                line = input(prompt)
            finally:
                signal.signal(signal.SIGTERM, before)
            save_history()
            return line
        if sys.stdin.isatty():
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def repl(self) -> int:
        """Read and answer until the person leaves. No line or answer ends it; a failed turn is taken back."""
        self.interactive = True
        self.messages = self.opening([])
        load_history()
        while True:
            try:
                line = self.read(">>> ")
            except EOFError:
                self.screen.note("")
                return 0
            except KeyboardInterrupt:
                if world_size() > 1:
                    raise       # torchrun ends all ranks, whatever they do
                self.screen.note("\n[Ctrl-D or /exit leaves]")
                continue
            try:
                if line.split() == ["/exit"]:
                    return 0
                if line.startswith("/") and "\n" not in line:
                    self.command(*line.split())
                elif line.strip():
                    self.turn(len(self.messages), [{"role": "user", "content": line}], [])
            except EOFError:
                self.screen.note("")
                return 0
            except KeyboardInterrupt:
                if world_size() > 1:
                    raise
                self.screen.note("[stopped; the turn is taken back]")
            except Exception as error:
                ranks_differ = world_size() > 1 and not isinstance(error, ValueError)
                if ranks_differ or isinstance(error, BrokenPipeError):      # or nobody reads any more
                    raise
                self.screen.note(f"error: {describe(error)}")

    def turn(self, keep: int, added: List[dict], otherwise: List[dict]) -> None:
        """Answer messages[:keep] + added. When that fails, messages[:keep] + otherwise is what remains."""
        self.messages[keep:] = added
        try:
            message, how = self.answer(self.messages)
        except BaseException:
            self.messages[keep:] = otherwise
            raise
        if how != "end" and not message["content"] and not message["tool_calls"]:
            self.messages[keep:] = otherwise
            self.screen.note("[nothing was said yet; the turn is taken back]")

    def command(self, name: str, *arguments: str) -> None:
        """A line that begins with a slash."""
        settings, note = self.settings, self.screen.note
        usage = next((key for key in HELP if key.split()[0] == name), None)
        allowed = {"/think": tuple(settings.efforts), "/tools": ("on", "off")}.get(name, ())
        if usage is None:
            note(f"error: there is no command {name}; /help lists them, a space in front makes it a message")
        elif len(arguments) > 1 or not set(arguments) <= set(allowed):
            note(f"error: usage is {usage}")
        elif name == "/help":
            note("\n".join(f"{key:24}{value}" for key, value in HELP.items()))
        elif name == "/clear":
            self.messages = self.opening([])
            note("[the conversation is forgotten]")
        elif name in ("/think", "/nothink"):
            settings.thinking_mode = "thinking" if name == "/think" else "chat"
            settings.reasoning_effort = arguments[0] if arguments else None
            note(f"[{'thinking' if name == '/think' else 'no thinking'} from now on]")
        elif name == "/regen":
            self.regen()
        elif name == "/tools":
            self.switch_tools(*arguments)
        else:
            model = self.session.model
            note(f"{self.session.stats}\ncontext {len(self.session.tokens)} of {model.max_seq_len} tok"
                 f"{cache_use(model)}")

    def regen(self) -> None:
        last = find_last_user_index(self.messages)
        if last < 0:
            self.screen.note("error: there is no answer to take back")
        else:
            self.turn(last + 1, [], self.messages[last + 1:])

    def switch_tools(self, state: str = "") -> None:
        tools = tools_from_openai_format(self.settings.tools or [])
        if state:
            self.tools_on = state == "on"
            said = [message for message in self.messages if message["role"] != "system"]
            self.messages = self.opening(said)
        lines = [f"{tool['name']}: {tool.get('description', '')}" for tool in tools]
        lines += [] if self.tools_on else ["[switched off]"]
        self.screen.note("\n".join(lines) if tools else "no tools; --tools FILE gives some")


def with_tools(messages: List[dict], tools: Optional[List[dict]]) -> List[dict]:
    """messages with tools declared in the system message, which is made when there is none."""
    if not tools:
        return messages
    first = messages[0] if messages and messages[0].get("role") == "system" else None
    return [{"role": "system", "content": "", **(first or {}), "tools": tools}] + messages[1 if first else 0:]


def prompt_of(messages: List[dict], settings: Settings) -> str:
    """encode_messages for a conversation that is to be answered."""
    last = messages[-1] if messages else {}
    if isinstance(last, dict) and last.get("role") == "assistant" and not last.get("wo_eos"):
        raise ValueError(f"message {len(messages)} (assistant) is a finished answer and comes last: end with "
                         "a user message, or mark it wo_eos to have it continued")
    return encode_messages(messages, settings.thinking_mode, reasoning_effort=settings.reasoning_effort,
                           efforts=settings.efforts)


def load_history() -> None:
    """Line editing and the lines of earlier chats, where the platform has readline."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    try:
        import readline
        readline.set_history_length(1000)
        readline.read_history_file(HISTORY_FILE)
    except (ImportError, OSError):
        pass            # no readline, or no history yet


def save_history() -> None:
    """Kept after each line, so that no way of leaving loses it; readable for its owner only."""
    try:
        import readline
        os.close(os.open(HISTORY_FILE, os.O_CREAT | os.O_WRONLY, 0o600))
        os.chmod(HISTORY_FILE, 0o600)
        readline.write_history_file(HISTORY_FILE)
    except (ImportError, OSError):
        pass            # a home that cannot be written to is no reason not to chat


def describe(error: Exception) -> str:
    """One line for an error: ours speak for themselves, others by their kind."""
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, RuntimeError) and re.search("Connection (closed|reset) by peer", text):    # gloo's
        return "another rank has ended; torchrun's report says which one"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def from_torchrun(name: str, default: int) -> int:
    """A number that torchrun puts into the environment."""
    text = os.getenv(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"{name} is {text!r}, no number: start with torchrun, or unset it to run alone")
    return int(text)


def world_size() -> int:
    size = from_torchrun("WORLD_SIZE", 1)
    if size < 1:
        raise ValueError("WORLD_SIZE is 0: start with torchrun, or unset it to run alone")
    return size


def rank() -> int:
    number, size = from_torchrun("RANK", 0), world_size()
    if number >= size:
        raise ValueError(f"RANK is {number}, but WORLD_SIZE is {size}: start with torchrun, or unset both to "
                         "run alone")
    return number


def let_rank_0_speak() -> None:
    """What every rank refuses, rank 0 says; torchrun, told by its exit code, then ends the others here.

    So what a rank says after this wait is its own trouble, and each trouble is said once."""
    if rank() > 0:
        time.sleep(RANK_0_SECONDS)


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        let_rank_0_speak()
        super().error(message)


def leave_ranks() -> None:
    """End what load_model began with the other ranks: a process that leaves without that may be aborted."""
    dist = sys.modules.get("torch.distributed")     # not imported here: wrong usage comes without torch
    if dist and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def share(job: Any) -> Any:
    """Rank 0's job (what Session.stream takes, None to end) on every rank."""
    if world_size() == 1:
        return job
    import torch.distributed as dist
    objects = [job]
    dist.broadcast_object_list(objects, 0)
    return objects[0]


def follow(model) -> int:
    """What ranks other than 0 do: the same passes as rank 0."""
    session = Session(model)
    while job := share(None):
        for _ in session.stream(*job):
            pass
    return 0


def answer_file(model, tokenizer, prompts: List[str], settings: Settings) -> int:
    """The vendor's --input-file: prompts in batches, printed with their completions."""
    eos_id = tokenizer.token_to_id(eos_token)
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    tokens = [encode_prompt(tokenizer, prompt_of(messages, settings)) for messages in asked]
    for prompt in tokens:       # all of them before the first batch takes its time
        check_prompts(model, [prompt])
    for start in range(0, len(prompts), model.max_batch_size):
        batch = slice(start, start + model.max_batch_size)
        completions = generate(model, tokens[batch], settings.max_new_tokens, eos_id, settings.temperature,
                               settings.top_p)
        for prompt, completion in zip(prompts[batch], completions):
            text = TokenText(tokenizer)
            print(f"Prompt: {prompt}\nCompletion: {''.join(map(text.push, completion[:-1]))}\n", flush=True)
    return 0


def parse_args(argv: Optional[List[str]] = None) -> argparse.Namespace:
    def number(kind, limits, what):
        def read(text):
            value = kind(text)
            if not limits[0] <= value <= limits[1]:     # also refuses nan
                raise ValueError
            return value
        read.__name__ = what                    # argparse says "invalid <what> value"
        return read

    count = number(int, (1, 1 << 40), "positive whole number")
    parser = Parser(
        description="Chat with DeepSeek-V4. Without --prompt, --messages and --input-file: a chat when "
        "standard input is a terminal, else standard input is the prompt.")
    parser.add_argument("--ckpt-path", default=DEFAULT_CKPT, help="folder of the checkpoint (default: tiny/)")
    parser.add_argument("--config", help="a config.json other than the folder's")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--interactive", action="store_true", help="chat, also when input is no terminal")
    what.add_argument("--prompt", help="answer this and leave; - reads standard input")
    what.add_argument("--messages", metavar="FILE", help='{"messages": [...], "tools": [...]} in OpenAI form')
    what.add_argument("--input-file", help="answer the prompts of a file, which blank lines part")
    parser.add_argument("--system", default="", help="system text")
    parser.add_argument("--tools", metavar="FILE", help="JSON list of tools (OpenAI form)")
    parser.add_argument("--tool-exec", metavar="CMD", help="runs calls: JSON on stdin, result on stdout")
    parser.add_argument("--thinking-mode", choices=("chat", "thinking"), default="chat")
    parser.add_argument("--reasoning-effort", choices=("low", "high", "max"), help="when thinking")
    parser.add_argument("--max-new-tokens", type=count, default=4096, help="default: %(default)s")
    parser.add_argument("--temperature", type=number(float, SAMPLING["temperature"], "temperature"),
                        help="0: the likeliest")
    parser.add_argument("--top-p", type=number(float, SAMPLING["top_p"], "probability"),
                        help="sample from the top")
    parser.add_argument("--seed", type=number(int, (-1 << 63, (1 << 64) - 1), "64-bit whole number"),
                        default=SEED)
    parser.add_argument("--max-seq-len", type=count, help="context, in tokens")
    parser.add_argument("--prefill-chunk", type=count, default=PREFILL_CHUNK,
                        help="prompt tokens that run through the layers at a time (default: %(default)s): "
                        "more are faster, and take more memory")
    parser.add_argument("--round-trips", default=",".join(ROUND_TRIPS), metavar="LIST",
                        help="roundings to simulate, of %(default)s; or none")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of activations")
    gigabytes = number(float, (0, 1e6), "number of GB")
    parser.add_argument("--cache-gb", type=gigabytes, metavar="G",
                        help="CPU: each process keeps up to G GB of dequantised weights (default: "
                        f"{CACHE_GB:g})")
    parser.add_argument("--device-gb", type=gigabytes, metavar="G",
                        help="GPU: keep experts in host memory, and up to G GB of copies on the GPU")
    parser.add_argument("--hide-thinking", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="no banner, progress or statistics")
    args = parser.parse_args(argv)
    args.round_trips = () if args.round_trips == "none" else tuple(args.round_trips.split(","))
    if not set(args.round_trips) <= set(ROUND_TRIPS):
        parser.error(f"--round-trips takes {', '.join(ROUND_TRIPS)}, or none")
    if args.reasoning_effort and args.thinking_mode == "chat":
        parser.error("--reasoning-effort needs --thinking-mode thinking")
    if args.system and args.messages:
        parser.error("--system does not go with --messages, whose file can hold a system message")
    return args


def read_text(path: str, flag: str) -> str:
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path}: it is no UTF-8 text") from None


def read_json(path: str, flag: str) -> Any:
    text = read_text(path, flag)
    try:
        value = json.loads(text)
        fits = json_fits(value)
    except RecursionError:
        fits = False
    except ValueError as error:     # of the syntax, or of a number with thousands of digits
        raise ValueError(f"{flag} {path}: it is no JSON ({error})") from None
    if not fits:
        raise ValueError(f"{flag} {path}: it is nested deeper than {MAX_NESTING} levels; make it flatter")
    return value


def sampling_of(args: argparse.Namespace) -> Dict[str, float]:
    """temperature and top_p: of the command line, else of generation_config.json, else 1."""
    path = os.path.join(args.ckpt_path, "generation_config.json")
    file = read_json(path, "--ckpt-path") if os.path.exists(path) else {}
    if not isinstance(file, dict):
        raise ValueError(f"{path} holds no JSON object: copy it again, or remove it")
    if not isinstance(file.get("do_sample"), (bool, type(None))):
        raise ValueError(f"{path}: do_sample is {file['do_sample']!r}, neither true nor false: correct it")
    found = {}
    for key, (low, high) in SAMPLING.items():
        found[key], value = getattr(args, key), file.get(key)
        if found[key] is not None:
            continue
        if key == "temperature" and file.get("do_sample") is False:
            value = 0.0
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and low <= value <= high):     # also refuses NaN
            raise ValueError(f"{path}: {key} is {value!r}, no number from {low} to {high}: correct it, or "
                             f"give --{key.replace('_', '-')}")
        found[key] = 1.0 if value is None else value
    return found


def settings_of(args: argparse.Namespace) -> Settings:
    """The command line and what the checkpoint's folder says about sampling."""
    tools = read_json(args.tools, "--tools") if args.tools else None
    if isinstance(tools, dict):
        tools = tools.get("tools")
    check_messages([{"role": "system", "tools": tools}])
    tool_exec = shlex.split(args.tool_exec) if args.tool_exec else None
    if tool_exec and not shutil.which(tool_exec[0]):
        raise ValueError(f"--tool-exec: there is no program {tool_exec[0]}")
    if tool_exec and not (tools or args.messages):
        raise ValueError("--tool-exec runs what the model calls: say with --tools what it may call")
    config = config_of(args.ckpt_path, args.config)
    return Settings(
        max_new_tokens=args.max_new_tokens,
        thinking_mode=args.thinking_mode, reasoning_effort=args.reasoning_effort,
        **sampling_of(args),
        efforts=REASONING_EFFORTS_0731 if convert.has_dspark(config) else REASONING_EFFORTS,
        system=args.system, tools=tools, tool_exec=tool_exec,
        hide_thinking=args.hide_thinking, quiet=args.quiet)


def one_shot_messages(args: argparse.Namespace) -> Optional[List[dict]]:
    """The conversation of --prompt, --messages or standard input; None when people are to chat."""
    if args.messages:
        asked = read_json(args.messages, "--messages")
        messages = asked.get("messages") if isinstance(asked, dict) else asked
        if not isinstance(messages, list) or not messages:
            raise ValueError(f'--messages {args.messages}: it holds no list "messages"')
        check_messages(messages)
        return with_tools(messages, asked.get("tools") if isinstance(asked, dict) else None)
    prompt = args.prompt
    if args.interactive or args.input_file or prompt is None and sys.stdin.isatty():
        return None
    if prompt in (None, "-"):
        prompt = sys.stdin.read().removesuffix("\n")        # with which programs end their output
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    return [{"role": "user", "content": prompt}]


def file_prompts(path: str) -> List[str]:
    """The prompts of --input-file."""
    prompts = read_text(path, "--input-file").strip("\n").split("\n\n")
    blank = next((number for number, prompt in enumerate(prompts, 1) if not prompt.strip()), None)
    if not "".join(prompts).strip():
        raise ValueError(f"--input-file {path}: it holds no prompt")
    if blank:
        raise ValueError(f"--input-file {path}: prompt {blank} is blank; put one empty line between prompts")
    return prompts


def run(args: argparse.Namespace) -> int:
    """Check everything that needs no torch, load, then chat or answer."""
    if args.ckpt_path == DEFAULT_CKPT and not os.path.isdir(DEFAULT_CKPT):
        raise ValueError("there is no tiny/ beside generate.py: name a checkpoint's folder with --ckpt-path")
    tensors = check_checkpoint(args.ckpt_path, args.config)
    settings = settings_of(args)
    tokenizer = load_tokenizer(args.ckpt_path)
    if tokenizer is None or tokenizer.token_to_id(eos_token) is None:
        raise ValueError(f"{args.ckpt_path} has no tokenizer.json of DeepSeek-V4: copy the published one")
    leads = rank() == 0
    messages = one_shot_messages(args) if leads else None
    prompts = file_prompts(args.input_file) if args.input_file is not None else []
    if messages:
        prompt_of(messages, settings)       # one that cannot be answered need not wait for the weights

    screen, started = Screen(args.quiet or not leads), time.monotonic()

    def progress(done: int, total: int) -> None:
        rate = round(done / max(time.monotonic() - started, 1e-9))
        screen.progress(f"loading {readable(done)} of {readable(total)} ({readable(rate)}/s)")

    import torch
    torch.manual_seed(args.seed)
    model, tokenizer = load_model(
        args.ckpt_path, args.config, dtype=torch.float32 if args.dtype == "fp32" else torch.bfloat16,
        max_seq_len=args.max_seq_len, round_trips=args.round_trips,
        max_batch_size=min(max(len(prompts), 1), MAX_BATCH), max_chunk=args.prefill_chunk, progress=progress,
        cache_gb=args.cache_gb, device_gb=args.device_gb, tensors=tensors)
    screen.progress("")
    if prompts:
        return answer_file(model, tokenizer, prompts, settings)
    if not leads:
        return follow(model)
    if world_size() > 1:    # from here on Ctrl-C has to put the terminal right, and to end a tool
        signal.signal(signal.SIGINT, signal.default_int_handler)
    chat = Chat(model, tokenizer, settings)
    if messages:
        code = one_shot(chat, messages)
    else:
        if not args.quiet:
            name = os.path.basename(os.path.abspath(args.ckpt_path))
            screen.note(f"Plain V4 · {name} · context {model.max_seq_len} tok · /help lists the commands")
        code = chat.repl()
    share(None)     # the other ranks may go
    return code


def one_shot(chat: Chat, messages: List[dict]) -> int:
    """Answer and leave. Calls that no --tool-exec runs come out as a line of JSON."""
    message, how = chat.answer(chat.opening(messages))
    if message["tool_calls"] and not chat.settings.tool_exec:
        print(to_json({"tool_calls": message["tool_calls"]}), flush=True)
    return {"interrupt": 130, "rounds": 1}.get(how, 0)


def main(argv: Optional[List[str]] = None) -> int:
    """Exit code: 0 done, 1 failed at run time, 2 wrong usage or files, 130 interrupted."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:      # closed by whoever started this
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
        getattr(sys, name).reconfigure(errors="replace")
    leads = True
    try:
        leads = rank() == 0
        if world_size() > 1:    # Python would hear Ctrl-C only when a wait for another rank is over
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not leads:       # rank 0 does the talking
            sys.stdout = open(os.devnull, "w", encoding="utf-8", errors="replace")
        return run(parse_args(argv))
    except KeyboardInterrupt:
        print("\n[interrupted]", file=sys.stderr)
        return 130
    except BrokenPipeError:     # whoever read the answer has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if not leads:
            let_rank_0_speak()
        print(f"error: {describe(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        leave_ranks()


if __name__ == "__main__":
    sys.exit(main())
