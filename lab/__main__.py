"""`python -m lab`: the commands by name; what runs them is imported only then."""

from headmax_cli.commands import HEADMAX, Command, Program
from headmax_cli.main import main

LAB = Program(
    "python -m lab",
    "What only this repository runs: studies, pages and records. Run it in the root of a checkout.",
    {
        "Study": (
            Command("prepare", "lab.cli.study:prepare", "Prepare requests and needles for machines without lm-eval."),
            Command("run", "lab.cli.study:run", "Train and evaluate the models of some parts of the reproduction."),
            Command("collect", "lab.cli.study:collect", "Add the results of finished runs to the repository's records."),
            Command("theory", "lab.cli.study:theory", "Run the paper's proposition and theorems as experiments."),
        ),
        "Pages, from records": (
            Command("readme", "lab.cli.pages:readme", "Render the generated sections of the README and the docs."),
            Command("report", "lab.cli.pages:report", "Write the page of the reproduction from records."),
            Command("tables", "lab.cli.pages:tables", "Render the paper's three tables with our own results."),
            Command("figures", "lab.cli.pages:figures", "Draw the paper's figures from records."),
        ),
        "Package": (Command("package", "lab.cli.pages:package", "Write the records that the package needs into it."),),
        "Measurements": (
            Command(
                "bench train",
                "lab.cli.bench:train",
                "Time training steps beside flash-linear-attention in all its ways, first steps, and kernels by kind.",
            ),
            Command("bench drift", "lab.cli.bench:drift", "Measure how far logits move when states are kept in bfloat16."),
            Command(
                "bench released",
                "lab.cli.bench:released",
                "Time a layer stack in the shape of Qwen3.5 on headmax's ops and as transformers runs it.",
            ),
            Command("bench fit", "lab.cli.bench:fit", "Compile the kernels for a GPU that is not at hand; exit code 1 if they do not fit."),
        ),
    },
    {"bench": "Measure what our own pages show beside the records of `headmax bench`."},
    {option: about for option, about in HEADMAX.options.items() if not option.startswith("--completion")},
)

if __name__ == "__main__":
    main(program=LAB)
