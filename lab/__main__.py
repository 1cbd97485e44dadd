"""`python -m lab`: the commands by name; what runs them is imported only then."""

from headmax_cli.commands import HEADMAX, Command, Program
from headmax_cli.main import main

LAB = Program(
    "python -m lab",
    "What only this repository runs: studies, pages and records. Run it in the root of a checkout.",
    {
        "Study": (
            Command(
                "study data",
                "lab.cli.study:data",
                "Prepare the study's texts, needles and questions, in pieces; rerun to resume.",
            ),
            Command("study run", "lab.cli.study:study_run", "Train, score and record what comes next in the plan; rerun to resume."),
            Command("theory", "lab.cli.study:theory", "Run the paper's proposition and theorems as experiments."),
        ),
        "Pages, from records": (
            Command("readme", "lab.cli.pages:readme", "Render the generated sections of the README and the docs."),
            Command("findings", "lab.cli.pages:findings", "Write the page of the study's findings from records."),
            Command("report", "lab.cli.pages:report", "Write the page of the reproduction from records."),
            Command("notebook", "lab.cli.pages:notebook", "Run the notebook of the quickstart and keep its outputs."),
            Command("figures", "lab.cli.pages:figures", "Draw the paper's figures from records."),
        ),
        "Package": (Command("package", "lab.cli.pages:package", "Write the records that the package needs into it."),),
        "Other libraries' tests": (
            Command(
                "ecosystem transformers",
                "lab.cli.ecosystem:transformers",
                "Run transformers' tests of a language model on every mixer, with and without gates.",
            ),
            Command("ecosystem fla", "lab.cli.ecosystem:fla", "Run flash-linear-attention's tests of its ops on headmax's."),
        ),
        "Measurements": (
            Command("bench all", "lab.cli.bench:record_set", "Make all records of our pages at one commit, part by part; rerun to resume."),
            Command(
                "bench eager",
                "lab.cli.bench:eager",
                "Time training steps that are not compiled, by the wall clock, and the host's time of one op call.",
            ),
            Command(
                "bench train",
                "lab.cli.bench:train",
                "Time training steps beside flash-linear-attention in all its ways, first steps, and kernels by kind.",
            ),
            Command(
                "bench serve",
                "lab.cli.bench:serve",
                "Time the server's scheduler beside the static engine, first tokens after a prefix hit, and decoding while others read.",
            ),
            Command(
                "bench long",
                "lab.cli.bench:long",
                "Train on a sequence of a million tokens by segments; exit code 1 if the loss is another.",
            ),
            Command("bench drift", "lab.cli.bench:drift", "Measure how far logits move when states are kept in bfloat16."),
            Command(
                "bench endure",
                "lab.cli.bench:endure",
                "Kill a training run again and again beside one left alone, and watch the memory of training, serving and evaluation.",
            ),
            Command(
                "bench released",
                "lab.cli.bench:released",
                "Time a layer stack in the shape of Qwen3.5 on headmax's ops and as transformers runs it.",
            ),
            Command("bench fit", "lab.cli.bench:fit", "Compile the kernels for a GPU that is not at hand; exit code 1 if they do not fit."),
        ),
    },
    {
        "study": "The study of lab/study/plan.md: its data and its runs.",
        "bench": "Measure what our own pages show beside the records of `headmax bench`.",
        "ecosystem": "Run the tests of other libraries on headmax, from a checkout of theirs.",
    },
    {option: about for option, about in HEADMAX.options.items() if not option.startswith("--completion")},
)

if __name__ == "__main__":
    main(program=LAB)
