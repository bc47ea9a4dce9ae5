"""Read and compress a document once, before anybody has asked anything; then ask several questions about it.

python examples/ask_later.py
"""

import kvtailor

model, tokenizer = kvtailor.load_model("demo")
document = (
    "The ferry left the island twice a day. " * 9 + "The code of the harbour is 48213. " + "Nobody was there. " * 15
)
questions = [" The code of the harbour is", " Nobody was", " The ferry left the"]

# `snapkv` goes by the end of what it has seen and compresses after every 64 tokens, so that the cache never holds more
# than 48 + 64 of them. `kvzip` lets the model repeat the whole document and keeps what it needs for that.
for plan, chunk in (("full", None), ("snapkv @ tokens=48", 64), ("kvzip @ tokens=48", None)):
    reading = kvtailor.read(model, tokenizer, document, plan=plan, chunk=chunk)
    answers = reading.ask(questions, max_new_tokens=5, do_sample=False)
    print(reading.cache)
    for question, text in zip(answers.questions, answers.texts, strict=True):
        print(f"  {question}: {text!r}")

# The same with the question inside: what is kept may depend on it, and the document is read anew for each.
inside = kvtailor.ask(
    model,
    tokenizer,
    document,
    questions,
    plan="snapkv(kernel=21) @ tokens=48",
    question="inside",
    max_new_tokens=5,
    do_sample=False,
)
print(f"{inside.plan}, question inside: {inside.texts[0]!r} from {inside.ledgers[0].held:.0f} tokens per head")
