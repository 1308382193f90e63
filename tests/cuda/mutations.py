"""Breaks the CUDA kernels on purpose, one place at a time, and demands that the emulated op table notices.

    python tests/cuda/mutations.py BUILD_FOLDER [NAME...]

BUILD_FOLDER is a build of this project whose test_cuda_ops is up to date. Each mutation is made in a copy of one kernel
source, which is compiled as the build compiles it and linked in place of the right one. A mutation that no test notices
is printed as MISSED and makes the exit status 1. Takes some ten seconds a mutation, so it is run by hand.
"""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]

EVERY = object()  # every occurrence goes, not only the first

# name, file, what stands there (white space as it comes), what stands there instead
MUTATIONS = [
    ("off by one: a row too many", "device.h", "if (row >= rows)", "if (row > rows)"),
    ("off by one: the window", "attention.h", "own - args.window + 1", "own - args.window"),
    ("off by one: causality", "attention.cu", "key <= own && key >= first_visible(args, own);",
     "key <= own + 1 && key >= first_visible(args, own);"),
    ("off by one: causality on tensor cores", "attention_bf16.cu", "bool visible = key <= own &&",
     "bool visible = key < own &&"),
    ("off by one: a lane's columns", "attention_bf16.cu", "lane / 16 * 8", "lane / 16 * 8 + 8"),
    ("off by one: the convolution's first input", "conv.cu", "offset - TAPS + k, channel", "offset - TAPS + k + 1, channel"),
    ("off by one: the carried tail", "conv.cu", "(args.kernel - 1 + offset)", "(args.kernel - 2 + offset)"),
    ("off by one: the last state of a scan", "selective_scan.cu", "index == s.n_tiles - 1", "index == s.n_tiles - 2"),
    ("off by one: a chunk's causality", "ssd_scan.cu", "i <= at && at < tile.length", "i < at && at < tile.length"),
    ("off by one: slots of an expert", "group_experts.cu", "order[place] = (int32_t)(first + i);",
     "order[place] = (int32_t)(first + i + 1);"),
    ("off by one: a piece of a capture", "embed.cu", "(c.first + i) % c.x.cols", "(c.first + i + 1) % c.x.cols"),
    ("no barrier: a block's sum, before", "device.h",
     "    __syncthreads(); /* `partial` may still be read from the time before */\n", ""),
    ("no barrier: a block's sum, after", "device.h", "        partial[warp] = value;\n    __syncthreads();",
     "        partial[warp] = value;"),
    ("no barrier: B and C of a scan", "selective_scan.cu",
     "        load_step(s, (int64_t)tile.row + first, n, states, shared);\n        __syncthreads();",
     "        load_step(s, (int64_t)tile.row + first, n, states, shared);"),
    ("no barrier: B and C of a scan, used too late", "selective_scan.cu",
     "        __syncthreads(); /* the last step's B and C have been used */\n", ""),
    ("no barrier: a chunk's steps", "ssd_scan.cu", "to.beta[t] = s.betas[at]; } __syncthreads();",
     "to.beta[t] = s.betas[at]; }"),
    ("no barrier: product tiles, before", "tile_product.h",
     "            __syncthreads(); /* what is in shared memory has been used */\n", EVERY),
    ("no barrier: product tiles, after", "tile_product.h", "            __syncthreads();\n            multiply_terms",
     "            multiply_terms"),
    ("no barrier: scores", "attention.cu", "        score_keys(args, q, first, shared);\n        __syncthreads();",
     "        score_keys(args, q, first, shared);"),
    ("no barrier: exponentials", "attention.cu", "        exponentiate(shared);\n        __syncthreads();",
     "        exponentiate(shared);"),
    ("no barrier: keys and values, before", "attention_bf16.cu",
     "        __syncthreads(); /* the last keys and values have been used */\n", ""),
    ("no barrier: keys and values, after", "attention_bf16.cu", "        __syncthreads();\n        multiply_keys",
     "        multiply_keys"),
    ("no barrier: a warp's choice", "route.cu", "        __syncwarp();\n        total", "        total"),
    ("no barrier: experts counted", "group_experts.cu", "    __syncthreads();\n    int64_t first", "    int64_t first"),
    ("wrong mask: a warp's sum", "device.h", "value += __shfl_xor_sync(ALL_LANES, value, offset);",
     "value += __shfl_xor_sync(0x0000ffffu, value, offset);"),
    ("wrong mask: a row's largest score", "attention_bf16.cu", "__shfl_xor_sync(ALL_LANES, value, 1)",
     "__shfl_xor_sync(0x33333333u, value, 1)"),
    ("wrong mask: lanes of a channel", "selective_scan.cu", "__shfl_xor_sync(ALL_LANES, value, offset)",
     "__shfl_xor_sync(0xfffffffeu, value, offset)"),
    ("wrong mask: the best expert", "route.cu", "__shfl_xor_sync(ALL_LANES, best, offset)",
     "__shfl_xor_sync(0x7fffffffu, best, offset)"),
    ("wrong stream order: a capture not waited for", "transfer.c",
     "!cuda_check(cuda, cudaStreamWaitEvent(cuda->copy, piece->filled, 0), \"ordering streams\") ||", ""),
    ("wrong stream order: a piece reused too early", "transfer.c",
     "if (!cuda_check(cuda, cudaEventSynchronize(piece->done), \"waiting for a transfer\"))", "if (false)"),
    ("wrong stream order: a posted row not waited for", "captures.c",
     "cuda_check(cuda, cudaStreamWaitEvent(cuda->copy, captures->filled, 0), \"ordering streams\") &&", ""),
    ("wrong stream order: a posted row taken too early", "captures.c",
     "TRY(cuda_translate(cuda, cudaEventSynchronize(post->done), \"waiting for captured rows\", error));", ";"),
    ("off by one: a full ring of captured rows", "captures.c", "return n > 0 && *at + span < tail;", "return n > 0;"),
    ("off by one: what overflows", "embed.cu", "n_overflow += isfinite(value) && (bits & 0x7fffu) == 0x7c00u;",
     "n_overflow += (bits & 0x7fffu) == 0x7c00u;"),
    ("wrong mask: a count of what overflows", "embed.cu", "__shfl_xor_sync(ALL_LANES, n_overflow, offset)",
     "__shfl_xor_sync(0x0000ffffu, n_overflow, offset)"),
    ("wrong stream order: a ring reused too early", "staging.c",
     "return cuda_check(cuda, cudaEventSynchronize(ring->read[ring->half]), \"waiting for tables to be read\");",
     "return true;"),
    ("a host pointer on the device", "embed.cu",
     "gather(cuda, \"gather_rows\", x, index, out);", "gather(cuda, \"gather_rows\", x, rows.index, out);"),
    ("a carry written before it was read", "selective_scan.cu", "s.last = static_cast<float *>(scratch_take(",
     "s.last = args->carry; (void)static_cast<float *>(scratch_take("),
]


def compile_command(build, source):
    """The flags that the build compiles `source` with for the emulated device, and its object there."""
    folder = build / "tests/cuda/CMakeFiles/actdump_emulated.dir"
    language = "CXX" if source.endswith(".cu") else "C"
    flags = (folder / "flags.make").read_text()
    words = []
    for kind in ("DEFINES", "INCLUDES", "FLAGS"):
        words += shlex.split(re.search(rf"^{language}_{kind} = (.*)$", flags, re.M).group(1))
    compiler = re.search(rf"^CMAKE_{language}_COMPILER:\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.M)
    return ([compiler.group(1) if compiler else {"CXX": "c++", "C": "cc"}[language]] + words,
            folder / f"__/__/kernels/cuda/{source}.o")


def users_of(header):
    return sorted(p.name for p in (ROOT / "kernels/cuda").glob("*.cu")
                  if header == "device.h" or f"kernels/cuda/{header}" in p.read_text())


def build_mutant(build, scratch, file, text):
    """A test program in which `file` reads `text`; its path."""
    folder = scratch / "kernels/cuda"
    shutil.copytree(ROOT / "kernels/cuda", folder)
    (folder / file).write_text(text)
    link = shlex.split((build / "tests/cuda/CMakeFiles/test_cuda_ops.dir/link.txt").read_text())
    for source in users_of(file) if file.endswith(".h") else [file]:
        command, right = compile_command(build, source)
        wrong = scratch / f"{source}.o"
        subprocess.run([command[0], f"-I{scratch}", *command[1:], "-w", "-O1", "-c", folder / source, "-o", wrong],
                       check=True)
        link[link.index(str(right.relative_to(build / "tests/cuda")))] = str(wrong)
    link[link.index("-o") + 1] = str(scratch / "ops")
    subprocess.run(link, check=True, cwd=build / "tests/cuda")
    return scratch / "ops"


def try_mutation(build, mutation):
    _, file, before, after = mutation
    text = (ROOT / "kernels/cuda" / file).read_text()
    pattern = re.compile(r"\s+".join(map(re.escape, before.split())))
    if not pattern.search(text):
        return "STALE: the source has no such place"
    text = pattern.sub("", text) if after == EVERY else pattern.sub(lambda _: after, text, count=1)
    with tempfile.TemporaryDirectory() as scratch:
        program = build_mutant(build, pathlib.Path(scratch), file, text)
        try:
            done = subprocess.run([program], capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            return "caught: it hangs"
    if done.returncode == 0:
        return "MISSED"
    said = done.stdout + done.stderr
    for pattern in (r"first fault: (.*)", r"ERROR: (.*)", r"\[  ERROR   \] --- (.*)"):
        if found := re.search(pattern, said):
            return "caught: " + found.group(1)[:150]
    return "caught: the program ended with status %d" % done.returncode


def main():
    build, names, missed = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:], 0
    for mutation in MUTATIONS:
        if names and not any(n in mutation[0] for n in names):
            continue
        verdict = try_mutation(build, mutation)
        missed += not verdict.startswith("caught")
        print(f"{mutation[0]} ({mutation[1]}): {verdict}", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
