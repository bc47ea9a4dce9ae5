"""Rows in the layouts of LongBench and ZeroSCROLLS, and a tokenizer with a chat template."""

from __future__ import annotations

import json

from tests.support.bench.dummy import DummyTokenizer


def lines_to(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def longbench_row(context, answers, **more):
    return {"input": "an abstract", "context": context, "answers": answers, "all_classes": None, "length": 1} | more


def scrolls_row(name, document, query, answer, **more):
    head = "You are given a text. Answer the question.\n\nText:\n"
    text = f"{head}{document}\n\n{query}\n\nAnswer:\n"
    at = text.index(query)
    where = {"document_start_index": len(head), "document_end_index": at - 2}
    where |= {"query_start_index": at, "query_end_index": at + len(query)}
    row = {"id": name, "pid": f"{name}_0", "input": text, "output": answer, **where}
    return row | {"truncation_seperator": "... [The rest of the text is omitted]\n\n"} | more


class ChatTokenizer(DummyTokenizer):
    chat_template = "<u>{}</u>"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt and [each["role"] for each in messages] == ["user"]
        return f"<u>{messages[0]['content']}</u>"
