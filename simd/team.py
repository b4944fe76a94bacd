"""A team of threads that share out compiled work within a microsecond or two.

A *program* is what a team runs: int64 [tasks, 4], one row per task of

    STAGE, FUNCTION, ARGUMENT, PARTS

FUNCTION is the address of a compiled `TaskKernel`, called once for each number from 0 to PARTS - 1, in any order, on any
thread; ARGUMENT is passed on to it, usually the address of a record that says where the numbers lie. Tasks with the same STAGE,
which have to be rows in succession, run side by side; a stage begins when all parts of the one before are done. So what a stage
writes, the next may read, and parts of one stage have to write to different places.

A program's arrays belong to the caller, who keeps them alive. `run(team, program)` is called from within a kernel or from
Python; `team` is the address that `Workers.ready()` returns (0: no helper threads, the calling thread does everything).

How it works: the word NEXT holds (parts of the stage) << 32 | (the next part that nobody has taken). Adding one to it takes a
part, for the thread that adds; once taken, the program cannot end before the part is done, so that its rows may be read. The
thread that finishes a stage's last part opens the next stage. The thread that runs a program takes parts too, and waits
only for parts that others have taken: helpers that are late, asleep or gone slow it down and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types

from . import llvm
from .compile import intrinsic, kernel, native_entry
from .compile.background import Unit, compiling
from .llvm import CACHE_LINE
from .target import target

STAGE, FUNCTION, ARGUMENT, PARTS = range(4)

# Words of a team's state, as offsets in bytes: those that different threads write lie in different pairs of cache lines, which
# some processors fetch together.
_LINE_PAIR = 2 * CACHE_LINE
NEXT, DONE, RUNNING, ENDED, COMMAND, YIELD = (_LINE_PAIR * i for i in range(6))
PROGRAM, TASKS, FIRST, LAST = (RUNNING + 8 * i for i in range(1, 5))  # in RUNNING's line, for threads with a part
STATE_WORDS = 6 * _LINE_PAIR // 8

NO_COMMAND, STOP = 0, -1  # a positive number: how many Python calls are waiting
_LOW_HALF = (1 << 32) - 1
# Rounds of waiting between two calls of sched_yield: 40 to 200 microseconds. A thread that shares its core with the one it
# waits for has to yield; but Linux (6.6 and later) takes a whole time slice away from a thread that does.
_YIELD_ROUNDS = 4096
_POINTER = llvm.I64.as_pointer()


@intrinsic
def atomic_load(typingctx, address):
    """The int64 at an address, atomically (acquire)."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], _POINTER), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def atomic_store(typingctx, address, value):
    """Sets the int64 at an address, atomically (release)."""

    def generate(context, builder, signature, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], _POINTER), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def atomic_add(typingctx, address, value):
    """Adds to the int64 at an address, atomically; returns what it was before."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _POINTER), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_exchange(typingctx, address, value):
    """Sets the int64 at an address, atomically; returns what it was before."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("xchg", builder.inttoptr(args[0], _POINTER), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def call_part(typingctx, function, argument, number):
    """Calls the compiled function at an address with two int64."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [llvm.I64, llvm.I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def call_plain(typingctx, function):
    """Calls the compiled function without arguments at an address (its result, if any, an int)."""

    def generate(context, builder, signature, args):
        builder.call(builder.inttoptr(args[0], ir.FunctionType(llvm.I32, []).as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


# Architecture -> LLVM's name of the instruction, and its argument (the kind of hint) where it takes one.
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}


@intrinsic
def pause(typingctx):
    """Says to the processor that this is a loop that waits (x86: pause, ARM: yield)."""

    def generate(context, builder, signature, args):
        if target().architecture in _PAUSES:
            name, arguments = _PAUSES[target().architecture]
            llvm.call(builder, name, ir.VoidType(), *(llvm.I32(a) for a in arguments))
        return context.get_dummy_value()

    return types.void(), generate


class TaskKernel:
    """A function (operands, number) that programs call, compiled when its address is first asked for. Nothing may be raised in
    it.

    dtype  of the record at ARGUMENT, which the function gets as `operands`; None: it gets the address
    """

    def __init__(self, function: Callable[[Any, int], None], dtype: np.dtype | None = None):
        self.function, self.dtype = function, dtype

    @property
    def unit(self) -> Unit:
        """What `compile_in_background` takes, for a function that its module has by name."""
        return Unit(self.function.__module__, self.function.__qualname__)

    @cached_property
    def address(self) -> int:
        operands = types.int64 if self.dtype is None else from_dtype(self.dtype)  # records are passed by address
        with compiling(self.unit):
            self._native = native_entry(types.void(operands, types.int64), self.function)  # keeps the code in memory
        return self._native.address


@kernel
def _open_stage(team, first):
    """Opens the first stage, from task `first` on, that has parts; ends the program if none has."""
    program, tasks = atomic_load(team + PROGRAM), atomic_load(team + TASKS)
    total, last = 0, first
    while total == 0 and last < tasks:
        first = last
        stage = atomic_load(program + 32 * first + 8 * STAGE)
        while last < tasks and atomic_load(program + 32 * last + 8 * STAGE) == stage:
            total += atomic_load(program + 32 * last + 8 * PARTS)
            last += 1
    if total == 0:
        atomic_store(team + ENDED, 1)
        return
    atomic_store(team + FIRST, first)
    atomic_store(team + LAST, last)
    atomic_store(team + DONE, 0)
    atomic_store(team + NEXT, total << 32)


@kernel
def _run_parts(team):
    """Takes and runs parts for as long as there are any. Returns whether there were."""
    worked = False
    taken = atomic_load(team + NEXT)
    while (taken & _LOW_HALF) < (taken >> 32):
        taken = atomic_add(team + NEXT, 1)
        number, parts = taken & _LOW_HALF, taken >> 32
        if number >= parts:
            break
        worked = True
        row = atomic_load(team + PROGRAM) + 32 * atomic_load(team + FIRST)
        size = atomic_load(row + 8 * PARTS)
        while number >= size:
            number -= size
            row += 32
            size = atomic_load(row + 8 * PARTS)
        call_part(atomic_load(row + 8 * FUNCTION), atomic_load(row + 8 * ARGUMENT), number)
        if atomic_add(team + DONE, 1) + 1 == parts:
            _open_stage(team, atomic_load(team + LAST))
        taken = atomic_load(team + NEXT)
    return worked


@kernel
def _wait(team, rounds):
    """One round of waiting; rounds: how many there have been in a row, this one included."""
    pause()
    if rounds % _YIELD_ROUNDS == 0:
        sched_yield = atomic_load(team + YIELD)
        if sched_yield:
            call_plain(sched_yield)


@kernel
def run(team, program):
    """Runs a program, int64 [tasks, 4]: returns when all of it is done.

    team: the address of a state, or 0. While the team is busy with another thread's program, this one runs here alone.
    """
    if team == 0 or atomic_exchange(team + RUNNING, 1):
        for task in range(len(program)):
            for number in range(program[task, PARTS]):
                call_part(program[task, FUNCTION], program[task, ARGUMENT], number)
        return
    atomic_store(team + PROGRAM, program.ctypes.data)
    atomic_store(team + TASKS, len(program))
    atomic_store(team + ENDED, 0)
    _open_stage(team, 0)
    rounds = 0
    while atomic_load(team + ENDED) == 0:
        if _run_parts(team):
            rounds = 0
        else:
            rounds += 1
            _wait(team, rounds)
    atomic_store(team + RUNNING, 0)


@kernel
def help_out(team, patience):
    """What a helper thread does: runs parts of programs, until there is a command, or nothing to do for `patience` rounds.

    Returns the command, or NO_COMMAND.
    """
    rounds = 0
    while rounds < patience:
        if _run_parts(team):
            rounds = 0
        command = atomic_load(team + COMMAND)
        if command != NO_COMMAND:
            return command
        rounds += 1
        _wait(team, rounds)
    return NO_COMMAND


@kernel
def pauses(n):
    """Executes n pauses, for measuring how long one takes."""
    for _ in range(n):
        pause()


def new_state(sched_yield: int) -> np.ndarray:
    """int64 words for one team; those from `state_address` on are used. sched_yield: the address of that function, or 0."""
    state = np.zeros(STATE_WORDS + _LINE_PAIR // 8, np.int64)
    state[(state_address(state) - state.ctypes.data + YIELD) // 8] = sched_yield
    return state


def state_address(state: np.ndarray) -> int:
    """The address that kernels take as `team`: that of the first cache line of a state."""
    return -(-state.ctypes.data // _LINE_PAIR) * _LINE_PAIR
