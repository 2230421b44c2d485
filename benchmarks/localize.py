"""What the main job costs: `localize` on the bundled Llama with 64 prompts, on one thread and on two.

They take turns. The wait is the clock's, so leave the machine alone; processor time is printed beside it. The ratio
is the median over rounds of the ratio within a round. Memory, on Linux, is the peak of the process above what it held
when the model was loaded, beside the size of the weights.

    python benchmarks/localize.py [--model toy-llama] [--n 64] [--phrase-len 2] [--rounds 5] [--threads 1,2]
"""

import time
from pathlib import Path
from statistics import median

import torch
from contest import command_line, ratios, spread
from probe_rows import resident

import align_circuits as ac

if __name__ == "__main__":
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--threads", default="1,2", help="one or more, separated by commas")
    parser.add_argument("--model", default="toy-llama", help="what `load` takes")
    parser.add_argument("--n", type=int, default=64, help="prompts")
    parser.add_argument("--phrase-len", type=int, default=2)
    arguments = parser.parse_args()
    threads = [int(number) for number in arguments.threads.split(",")]
    model = ac.load(arguments.model)
    task = ac.Seq2SeqTask(x_len=5, phrase_len=arguments.phrase_len, n_examples=15)
    weights = sum(each.numel() * each.element_size() for each in model.original_model.parameters()) / 1e9
    clear_refs = Path("/proc/self/clear_refs")
    if clear_refs.exists():
        clear_refs.write_text("5", encoding="utf-8")  # the peak starts anew
        loaded = resident("VmRSS")
    waits: dict[int, list[float]] = {number: [] for number in threads}
    works: dict[int, list[float]] = {number: [] for number in threads}
    for _ in range(arguments.rounds):
        for number in threads:
            torch.set_num_threads(number)
            clock, processor = time.perf_counter(), time.process_time()
            found = ac.localize(model, task, n=arguments.n, seed=0)
            waits[number].append(time.perf_counter() - clock)
            works[number].append(time.process_time() - processor)
    for number, waited in waits.items():
        print(
            f"threads {number}: {spread(waited, 1)} s on the clock, {median(works[number]):.1f} s of the processor; "
            f"{median(ratios(waits[threads[0]], waited)):.2f} times as fast as with {threads[0]}; {len(waited)} rounds"
        )
    if clear_refs.exists():
        above = (resident("VmHWM") - loaded) * 2**20 / 1e9
        print(f"memory: {above:.2f} GB above the loaded model, whose weights are {weights:.2f} GB")
    print(
        ", ".join(
            f"{name}: {getattr(found.evidence, name).provenance.engine}"
            for name in ("patching_effects", "ablation_effects", "set_ablations")
        )
    )
    print(found.summary)
