"""The plan that is cut to a memory, on the embedded model and a text that is made up: a look at `kvtailor.fit`."""

import kvtailor
from kvtailor.fitting.effort import Effort
from kvtailor.fitting.material import generated

# Seconds instead of minutes: far too little for a plan that you would use.
LEAST = Effort(
    name="least",
    first=(3, 1),
    rest=(1, 1),
    widths=(4,),
    shares=(0.25,),
    by_head=False,
    trials=6,
    front=1,
    levels=(),
    fitted=1,
    presets=1,
    windows=(6, 5),
)


def main() -> None:
    context = 256
    found = kvtailor.fit(
        "demo",
        generated(context, windows=16),
        keep_bytes=0.3,
        context=context,
        effort=LEAST,
        timed=False,
        tasks=["needle"],
        proof_tasks=["passkey"],
        stages=["layers"],
        without=[
            "kvzip",
            "nuq",
            "minicache",
            "orthogonal",
            "h2o",
            "lowrank",
            "channels",
            "hadamard",
            "pairs",
            "tova",
            "expected",
            "keydiff",
            "critical",
            "dynamickv",
            "kvplugin",
            "bit_table",
            "chunks",
        ],
    )
    print(found)

    model, tokenizer = kvtailor.load_model("demo")
    inputs = tokenizer("The quick brown fox", return_tensors="pt")
    # A session takes every plan: some read a prompt twice, which generate() on a bare cache refuses.
    with kvtailor.session(model, found.plan, tokenizer) as session:
        output = session.generate(**inputs, max_new_tokens=8, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
