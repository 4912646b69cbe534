"""The thread pool's code, as LLVM IR (pool.py says what it does). One table of 64-bit words holds its state; `WORDS` names them. All words that
one thread writes and another reads are atomic and sequentially consistent; of a thread's record others read only its CPU and team, as hints.

A region has `parts` calls of one function. Each of them is made once, by the thread that takes its number from CLAIM: the calling one or a worker.
CLAIM holds the region's number, its parts and the next part (32, 16 and 16 bits), so that a late worker takes nothing of an ended region.
"""

from __future__ import annotations

from string import Template

CAPACITY = 255  # workers
RECORD = 16  # words of a thread's record; the first is the calling thread's
_LINE = 8  # words of a cache line

_STATE = ("claim", "done", "sleeping", "wake", "busy", "function", "caller_waits", "barrier", "workers", "affinity_bytes")
WORDS = {name: k * _LINE for k, name in enumerate(_STATE)} | {
    "context": 5 * _LINE + 1, "parts": 5 * _LINE + 2, "caller_cpu": 5 * _LINE + 3, "generation": 7 * _LINE + 1, "stop": 8 * _LINE + 1,
    "spin_ns": 8 * _LINE + 2, "wait_ns": 8 * _LINE + 3, "key": 8 * _LINE + 4, "most": 5 * _LINE + 4,
}  # fmt: skip
"""Each in its cache line: CLAIM; parts that ended; sleeping workers; what they sleep on; 1 while a region runs; its function; 1 while the calling
thread sleeps until the last part ends; parts that reached a barrier; workers; bytes of the CPU mask. Then the rest of their lines."""

_FUNCTIONS = {
    "get_record": "i64 (i32)", "set_record": "i32 (i32, i64)", "system_call": "i64 (i64, i64, i64, i64, i64, i64, i64)", "get_cpu": "i32 ()",
    "get_time": "i32 (i32, i64*)", "yield": "i32 ()", "gomp_start": "void (i64, i64, i32)", "gomp_end": "void ()", "gomp_thread": "i32 ()",
    "gomp_threads": "i32 ()", "gomp_nested": "i32 ()", "gomp_barrier": "void ()", "gomp_most": "i32 ()", "gomp_set_most": "void (i32)",
    "gomp_loop": "i8 (i64, i64, i64, i64, i64*, i64*)", "gomp_next": "i8 (i64*, i64*)", "gomp_loop_end": "void ()",
}  # fmt: skip
EXTERNAL = {name: len(_STATE) * _LINE + k for k, name in enumerate(_FUNCTIONS)}
"""The words with the addresses of functions of libc and libgomp."""
AFFINITY = (len(_STATE) + 2) * _LINE  # words of the CPUs that the process may use, before the records
AFFINITY_WORDS = 128
RECORDS = AFFINITY + AFFINITY_WORDS
SIZE = RECORDS + RECORD * (CAPACITY + 1)

# Words of a record: the part that the thread runs; its region's parts, 0 outside regions; the CPU it ran on last; its index; part and parts around a
# nested region, and the depth of nested regions; 1 if it shares its CPU and no other is free; a loop's bounds, step, chunk and next chunk.
_PART, _TEAM, CPU, INDEX, _OUTER_PART, _OUTER_TEAM, _DEPTH, _CROWDED, _LOOP = range(9)
_FUTEX = {"x86_64": (202, 203), "aarch64": (98, 122)}  # numbers of the system calls futex and sched_setaffinity
_PAUSE = {
    "x86_64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}

_TEXT = """
$declare_pause
@pool = internal global i64 0

define void @whet_pool_set(i64 %address) {
  store i64 %address, i64* @pool
  ret void
}

define internal i64* @word(i64 %k) {
  %base.w = load i64, i64* @pool
  %base = inttoptr i64 %base.w to i64*
  %p = getelementptr i64, i64* %base, i64 %k
  ret i64* %p
}

define internal i64 @get(i64 %k) {
  %p = call i64* @word(i64 %k)
  %v = load atomic i64, i64* %p seq_cst, align 8
  ret i64 %v
}

define internal void @put(i64 %k, i64 %v) {
  %p = call i64* @word(i64 %k)
  store atomic i64 %v, i64* %p seq_cst, align 8
  ret void
}

define internal i64 @add(i64 %k, i64 %v) {
  %p = call i64* @word(i64 %k)
  %old = atomicrmw add i64* %p, i64 %v seq_cst
  ret i64 %old
}

define internal i64 @field(i64* %record, i64 %k) {
  %p = getelementptr i64, i64* %record, i64 %k
  %v = load atomic i64, i64* %p monotonic, align 8
  ret i64 %v
}

define internal void @set_field(i64* %record, i64 %k, i64 %v) {
  %p = getelementptr i64, i64* %record, i64 %k
  store atomic i64 %v, i64* %p monotonic, align 8
  ret void
}

define internal i64* @record() {
  %key = call i64 @get(i64 $key)
  %key.i = trunc i64 %key to i32
  %w = call i64 @get_record(i32 %key.i)
  %p = inttoptr i64 %w to i64*
  ret i64* %p
}

define internal void @enter(i64 %record) {
  %key = call i64 @get(i64 $key)
  %key.i = trunc i64 %key to i32
  %status = call i32 @set_record(i32 %key.i, i64 %record)
  ret void
}

define internal i64 @team() {
  %r = call i64* @record()
  %none = icmp eq i64* %r, null
  br i1 %none, label %outside, label %inside
outside:
  ret i64 0
inside:
  %team = call i64 @field(i64* %r, i64 $TEAM)
  ret i64 %team
}

define internal i64 @now() {
  %time = alloca i64, i64 2
  %status = call i32 @get_time(i32 1, i64* %time)
  %s = load i64, i64* %time
  %ns.p = getelementptr i64, i64* %time, i64 1
  %ns = load i64, i64* %ns.p
  %s.ns = mul i64 %s, 1000000000
  %sum = add i64 %s.ns, %ns
  ret i64 %sum
}

define internal void @futex(i64 %k, i64 %operation, i64 %value) {
  %p = call i64* @word(i64 %k)
  %w = ptrtoint i64* %p to i64
  %status = call i64 @system_call(i64 $SYS_FUTEX, i64 %w, i64 %operation, i64 %value, i64 0, i64 0, i64 0)
  ret void
}

define i32 @whet_thread_num() {
  %team = call i64 @team()
  %outside = icmp eq i64 %team, 0
  br i1 %outside, label %other, label %own
other:
  %number = call i32 @gomp_thread()
  ret i32 %number
own:
  %r = call i64* @record()
  %part = call i64 @field(i64* %r, i64 $PART)
  %part.i = trunc i64 %part to i32
  ret i32 %part.i
}

define i32 @whet_num_threads() {
  %team = call i64 @team()
  %outside = icmp eq i64 %team, 0
  br i1 %outside, label %other, label %own
other:
  %number = call i32 @gomp_threads()
  ret i32 %number
own:
  %team.i = trunc i64 %team to i32
  ret i32 %team.i
}

define i32 @whet_in_parallel() {
  %team = call i64 @team()
  %outside = icmp eq i64 %team, 0
  br i1 %outside, label %other, label %own
other:
  %number = call i32 @gomp_nested()
  ret i32 %number
own:
  %several = icmp ugt i64 %team, 1
  %several.i = zext i1 %several to i32
  ret i32 %several.i
}

; The number of threads that the calling thread had set when the region began: a part may set its own.
define internal void @restore_most() {
  %most = call i64 @get(i64 $most)
  %most.i = trunc i64 %most to i32
  call void @gomp_set_most(i32 %most.i)
  ret void
}

; An iteration of a loop that waits: true in every `period`-th one (a power of two), from 0 on, in which the loop does more than look.
define internal i1 @spin(i64 %i, i64 %period) {
  $pause
  %mask = sub i64 %period, 1
  %within = and i64 %i, %mask
  %due = icmp eq i64 %within, 0
  ret i1 %due
}

; True if a value of CLAIM has a part that no thread took.
define internal i1 @has_part(i64 %v) {
  %next = and i64 %v, 65535
  %parts.s = lshr i64 %v, 16
  %parts = and i64 %parts.s, 65535
  %left = icmp ult i64 %next, %parts
  ret i1 %left
}

; The record of thread `k`.
define internal i64* @record_of(i64 %k) {
  %offset = mul i64 %k, $RECORD
  %at = add i64 %offset, $RECORDS
  %r = call i64* @word(i64 %at)
  ret i64* %r
}

; The next part of the current region, or -1.
define internal i64 @claim() {
  %p = call i64* @word(i64 $claim)
  br label %look
look:
  %v = load atomic i64, i64* %p seq_cst, align 8
  %left = call i1 @has_part(i64 %v)
  br i1 %left, label %take, label %none
take:
  %v1 = add i64 %v, 1
  %pair = cmpxchg i64* %p, i64 %v, i64 %v1 seq_cst seq_cst
  %taken = extractvalue { i64, i1 } %pair, 1
  br i1 %taken, label %own, label %look
own:
  %next = and i64 %v, 65535
  ret i64 %next
none:
  ret i64 -1
}

define internal void @run_part(i64* %record, i64 %part) {
  %parts = call i64 @get(i64 $parts)
  call void @set_field(i64* %record, i64 $PART, i64 %part)
  call void @set_field(i64* %record, i64 $TEAM, i64 %parts)
  call void @restore_most()
  %function.w = call i64 @get(i64 $function)
  %context = call i64 @get(i64 $context)
  %function = inttoptr i64 %function.w to void (i64)*
  call void %function(i64 %context)
  call void @set_field(i64* %record, i64 $TEAM, i64 0)
  %before = call i64 @add(i64 $done, i64 1)
  %after = add i64 %before, 1
  %last = icmp eq i64 %after, %parts
  br i1 %last, label %look, label %end
look:
  %waits = call i64 @get(i64 $caller_waits)
  %asleep = icmp ne i64 %waits, 0
  br i1 %asleep, label %wake, label %end
wake:
  call void @futex(i64 $done, i64 129, i64 1)
  br label %end
end:
  ret void
}

define internal void @wake_workers(i64 %count) {
  %sleeping = call i64 @get(i64 $sleeping)
  %any = icmp ne i64 %sleeping, 0
  br i1 %any, label %wake, label %end
wake:
  %old = call i64 @add(i64 $wake, i64 1)
  call void @futex(i64 $wake, i64 129, i64 %count)
  br label %end
end:
  ret void
}

; Wakes the workers and waits until they run, for 1 ms at most.
define void @whet_pool_wake() {
  %start = call i64 @now()
  %limit = add i64 %start, 1000000
  %workers = call i64 @get(i64 $workers)
  %cpu = call i32 @get_cpu()
  %cpu.w = sext i32 %cpu to i64
  call void @put(i64 $caller_cpu, i64 %cpu.w)
  call void @wake_workers(i64 %workers)
  br label %look
look:
  %sleeping = call i64 @get(i64 $sleeping)
  %none = icmp eq i64 %sleeping, 0
  br i1 %none, label %end, label %wait
wait:
  $pause
  %time = call i64 @now()
  %late = icmp sgt i64 %time, %limit
  br i1 %late, label %end, label %look
end:
  ret void
}

define void @whet_parallel_start(i64 %function, i64 %context, i32 %requested) {
  %team = call i64 @team()
  %nested = icmp ne i64 %team, 0
  br i1 %nested, label %inner, label %outer
inner:
  %r = call i64* @record()
  %depth = call i64 @field(i64* %r, i64 $DEPTH)
  %depth1 = add i64 %depth, 1
  call void @set_field(i64* %r, i64 $DEPTH, i64 %depth1)
  %first = icmp eq i64 %depth, 0
  br i1 %first, label %keep, label %alone
keep:
  %part = call i64 @field(i64* %r, i64 $PART)
  call void @set_field(i64* %r, i64 $OUTER_PART, i64 %part)
  call void @set_field(i64* %r, i64 $OUTER_TEAM, i64 %team)
  br label %alone
alone:
  call void @set_field(i64* %r, i64 $PART, i64 0)
  call void @set_field(i64* %r, i64 $TEAM, i64 1)
  ret void
outer:
  %default = icmp eq i32 %requested, 0
  br i1 %default, label %most, label %counted
most:
  %most.i = call i32 @gomp_most()
  br label %counted
counted:
  %parts.i = phi i32 [%requested, %outer], [%most.i, %most]
  %parts = zext i32 %parts.i to i64
  %workers = call i64 @get(i64 $workers)
  %few = icmp ult i64 %parts, 2
  %other = add i64 %workers, 1
  %too.many = icmp ugt i64 %parts, %other
  %unfit = or i1 %few, %too.many
  br i1 %unfit, label %fallback, label %lock
fallback:
  call void @gomp_start(i64 %function, i64 %context, i32 %parts.i)
  ret void
lock:
  %busy = call i64* @word(i64 $busy)
  %pair = cmpxchg i64* %busy, i64 0, i64 1 seq_cst seq_cst
  %free = extractvalue { i64, i1 } %pair, 1
  br i1 %free, label %again, label %fallback
again:
  %still = call i64 @get(i64 $workers)
  %ended = icmp ult i64 %still, %workers
  br i1 %ended, label %release, label %start
release:
  call void @put(i64 $busy, i64 0)
  br label %fallback
start:
  %own = call i64* @word(i64 $RECORDS)
  %own.w = ptrtoint i64* %own to i64
  call void @enter(i64 %own.w)
  call void @set_field(i64* %own, i64 $PART, i64 0)
  call void @set_field(i64* %own, i64 $TEAM, i64 %parts)
  call void @put(i64 $function, i64 %function)
  call void @put(i64 $context, i64 %context)
  call void @put(i64 $parts, i64 %parts)
  %own.most = call i32 @gomp_most()
  %own.most.w = zext i32 %own.most to i64
  call void @put(i64 $most, i64 %own.most.w)
  call void @put(i64 $done, i64 0)
  call void @put(i64 $barrier, i64 0)
  %cpu = call i32 @get_cpu()
  %cpu.w = sext i32 %cpu to i64
  call void @put(i64 $caller_cpu, i64 %cpu.w)
  %old = call i64 @get(i64 $claim)
  %number = lshr i64 %old, 32
  %number1 = add i64 %number, 1
  %high = shl i64 %number1, 32
  %middle = shl i64 %parts, 16
  %low = or i64 %middle, 1
  %v = or i64 %high, %low
  call void @put(i64 $claim, i64 %v)
  %wanted = sub i64 %parts, 1
  call void @wake_workers(i64 %wanted)
  ret void
}

define void @whet_parallel_end() {
  %team = call i64 @team()
  %outside = icmp eq i64 %team, 0
  br i1 %outside, label %other, label %own
other:
  call void @gomp_end()
  ret void
own:
  %r = call i64* @record()
  %depth = call i64 @field(i64* %r, i64 $DEPTH)
  %nested = icmp ne i64 %depth, 0
  br i1 %nested, label %inner, label %outer
inner:
  %depth1 = sub i64 %depth, 1
  call void @set_field(i64* %r, i64 $DEPTH, i64 %depth1)
  %left = icmp eq i64 %depth1, 0
  br i1 %left, label %restore, label %still
still:
  ret void
restore:
  %part = call i64 @field(i64* %r, i64 $OUTER_PART)
  %outer.team = call i64 @field(i64* %r, i64 $OUTER_TEAM)
  call void @set_field(i64* %r, i64 $PART, i64 %part)
  call void @set_field(i64* %r, i64 $TEAM, i64 %outer.team)
  ret void
outer:
  %mine = call i64 @add(i64 $done, i64 1)
  br label %more
more:
  %next = call i64 @claim()
  %none = icmp slt i64 %next, 0
  br i1 %none, label %wait, label %run
run:
  call void @run_part(i64* %r, i64 %next)
  br label %more
wait:
  call void @wait_for_parts(i64 %team)
  call void @restore_most()
  call void @set_field(i64* %r, i64 $TEAM, i64 0)
  call void @enter(i64 0)
  call void @put(i64 $busy, i64 0)
  ret void
}

; Spins; yields to a worker on the same CPU; sleeps after `wait_ns`, so that the scheduler moves a waiting worker to this CPU.
define internal void @wait_for_parts(i64 %parts) {
  %done0 = call i64 @get(i64 $done)
  %at.once = icmp eq i64 %done0, %parts
  br i1 %at.once, label %end, label %start
start:
  %begin = call i64 @now()
  %wait = call i64 @get(i64 $wait_ns)
  %limit = add i64 %begin, %wait
  br label %look
look:
  %i = phi i64 [1, %start], [%i1, %again]
  %done = call i64 @get(i64 $done)
  %all = icmp eq i64 %done, %parts
  br i1 %all, label %end, label %spin
spin:
  %i1 = add i64 %i, 1
  %check = call i1 @spin(i64 %i, i64 32)
  br i1 %check, label %slow, label %again
again:
  br label %look
slow:
  %shared = call i1 @shares_cpu()
  br i1 %shared, label %give, label %time
give:
  %status = call i32 @yield()
  br label %time
time:
  %t = call i64 @now()
  %late = icmp sgt i64 %t, %limit
  br i1 %late, label %sleep, label %again
sleep:
  call void @put(i64 $caller_waits, i64 1)
  %seen = call i64 @get(i64 $done)
  %ended = icmp eq i64 %seen, %parts
  br i1 %ended, label %awake, label %doze
doze:
  call void @futex(i64 $done, i64 128, i64 %seen)
  br label %awake
awake:
  call void @put(i64 $caller_waits, i64 0)
  br label %again
end:
  ret void
}

; True if a worker that runs a part was last seen on the calling thread's CPU.
define internal i1 @shares_cpu() {
  %cpu.i = call i32 @get_cpu()
  %cpu = sext i32 %cpu.i to i64
  %workers = call i64 @get(i64 $workers)
  br label %look
look:
  %k = phi i64 [1, %0], [%k1, %next]
  %left = icmp ule i64 %k, %workers
  br i1 %left, label %ask, label %none
ask:
  %r = call i64* @record_of(i64 %k)
  %team = call i64 @field(i64* %r, i64 $TEAM)
  %its = call i64 @field(i64* %r, i64 $CPU)
  %running = icmp ne i64 %team, 0
  %same = icmp eq i64 %its, %cpu
  %both = and i1 %running, %same
  %k1 = add i64 %k, 1
  br i1 %both, label %yes, label %next
next:
  br label %look
yes:
  ret i1 1
none:
  ret i1 0
}

define void @whet_parallel(i64 %function.w, i64 %context, i32 %parts, i32 %flags) {
  call void @whet_parallel_start(i64 %function.w, i64 %context, i32 %parts)
  %function = inttoptr i64 %function.w to void (i64)*
  call void %function(i64 %context)
  call void @whet_parallel_end()
  ret void
}

define void @whet_barrier() {
  %team = call i64 @team()
  %outside = icmp eq i64 %team, 0
  br i1 %outside, label %other, label %own
other:
  call void @gomp_barrier()
  ret void
own:
  %alone = icmp eq i64 %team, 1
  br i1 %alone, label %end, label %arrive
arrive:
  %generation = call i64 @get(i64 $generation)
  %before = call i64 @add(i64 $barrier, i64 1)
  %after = add i64 %before, 1
  %last = icmp eq i64 %after, %team
  br i1 %last, label %open, label %look
open:
  call void @put(i64 $barrier, i64 0)
  %opened = call i64 @add(i64 $generation, i64 1)
  ret void
look:
  %i = phi i64 [1, %arrive], [%i1, %spin], [%i1, %give]
  %now = call i64 @get(i64 $generation)
  %passed = icmp ne i64 %now, %generation
  br i1 %passed, label %end, label %wait
wait:
  %i1 = add i64 %i, 1
  %long = call i1 @spin(i64 %i, i64 1024)
  br i1 %long, label %give, label %spin
spin:
  br label %look
give:
  %status = call i32 @yield()
  br label %look
end:
  ret void
}

define i8 @whet_loop_start(i64 %start, i64 %end, i64 %step, i64 %chunk, i64* %first, i64* %last) {
  %team = call i64 @team()
  %outside = icmp eq i64 %team, 0
  br i1 %outside, label %other, label %own
other:
  %status = call i8 @gomp_loop(i64 %start, i64 %end, i64 %step, i64 %chunk, i64* %first, i64* %last)
  ret i8 %status
own:
  %r = call i64* @record()
  call void @set_field(i64* %r, i64 $LOOP0, i64 %start)
  call void @set_field(i64* %r, i64 $LOOP1, i64 %end)
  call void @set_field(i64* %r, i64 $LOOP2, i64 %step)
  call void @set_field(i64* %r, i64 $LOOP3, i64 %chunk)
  call void @set_field(i64* %r, i64 $LOOP4, i64 0)
  %any = call i8 @whet_loop_next(i64* %first, i64* %last)
  ret i8 %any
}

define i8 @whet_loop_next(i64* %first, i64* %last) {
  %team = call i64 @team()
  %outside = icmp eq i64 %team, 0
  br i1 %outside, label %other, label %own
other:
  %status = call i8 @gomp_next(i64* %first, i64* %last)
  ret i8 %status
own:
  %r = call i64* @record()
  %part = call i64 @field(i64* %r, i64 $PART)
  %start = call i64 @field(i64* %r, i64 $LOOP0)
  %end = call i64 @field(i64* %r, i64 $LOOP1)
  %step = call i64 @field(i64* %r, i64 $LOOP2)
  %chunk = call i64 @field(i64* %r, i64 $LOOP3)
  %done = call i64 @field(i64* %r, i64 $LOOP4)
  %up = icmp sgt i64 %step, 0
  %round = select i1 %up, i64 -1, i64 1
  %length = sub i64 %end, %start
  %length1 = add i64 %length, %step
  %length2 = add i64 %length1, %round
  %steps = sdiv i64 %length2, %step
  %whole = icmp eq i64 %chunk, 0
  br i1 %whole, label %even, label %chunks
even:
  %share = sdiv i64 %steps, %team
  %rest = srem i64 %steps, %team
  %longer = icmp slt i64 %part, %rest
  %more = zext i1 %longer to i64
  %extra = select i1 %longer, i64 %part, i64 %rest
  %even0 = mul i64 %part, %share
  %even1 = add i64 %even0, %extra
  %even2 = add i64 %even1, %share
  %even3 = add i64 %even2, %more
  %again = icmp ne i64 %done, 0
  %even4 = select i1 %again, i64 %even1, i64 %even3
  br label %found
chunks:
  %lap = mul i64 %done, %team
  %which = add i64 %lap, %part
  %chunk0 = mul i64 %which, %chunk
  %chunk1 = add i64 %chunk0, %chunk
  %beyond = icmp sgt i64 %chunk1, %steps
  %chunk2 = select i1 %beyond, i64 %steps, i64 %chunk1
  br label %found
found:
  %from = phi i64 [%even1, %even], [%chunk0, %chunks]
  %to = phi i64 [%even4, %even], [%chunk2, %chunks]
  %done1 = add i64 %done, 1
  call void @set_field(i64* %r, i64 $LOOP4, i64 %done1)
  %any = icmp slt i64 %from, %to
  br i1 %any, label %give, label %none
none:
  ret i8 0
give:
  %from.s = mul i64 %from, %step
  %to.s = mul i64 %to, %step
  %a = add i64 %start, %from.s
  %b = add i64 %start, %to.s
  store i64 %a, i64* %first
  store i64 %b, i64* %last
  ret i8 1
}

define void @whet_loop_end() {
  %team = call i64 @team()
  %outside = icmp eq i64 %team, 0
  br i1 %outside, label %other, label %own
other:
  call void @gomp_loop_end()
  ret void
own:
  ret void
}

; Keeps regions from starting on the pool, from when the current one has ended.
define void @whet_pool_lock() {
  %busy = call i64* @word(i64 $busy)
  br label %try
try:
  %pair = cmpxchg i64* %busy, i64 0, i64 1 seq_cst seq_cst
  %free = extractvalue { i64, i1 } %pair, 1
  br i1 %free, label %end, label %wait
wait:
  %status = call i32 @yield()
  br label %try
end:
  ret void
}

; Tells all workers to end. The pool is locked.
define void @whet_pool_stop() {
  call void @put(i64 $workers, i64 0)
  call void @put(i64 $stop, i64 1)
  %old = call i64 @add(i64 $wake, i64 1)
  call void @futex(i64 $wake, i64 129, i64 65535)
  ret void
}

define void @whet_pool_unlock() {
  call void @put(i64 $stop, i64 0)
  call void @put(i64 $busy, i64 0)
  ret void
}

; A worker leaves the CPU of the calling thread or of a worker before it, which it would keep from running. It may use all other CPUs until it meets
; one of them again.
define internal void @leave_shared_cpu(i64* %r) {
  %cpu.i = call i32 @get_cpu()
  %cpu = sext i32 %cpu.i to i64
  call void @set_field(i64* %r, i64 $CPU, i64 %cpu)
  %index = call i64 @field(i64* %r, i64 $INDEX)
  %caller = call i64 @get(i64 $caller_cpu)
  %with.caller = icmp eq i64 %cpu, %caller
  br i1 %with.caller, label %move, label %look
look:
  %k = phi i64 [1, %0], [%k1, %ask]
  %left = icmp ult i64 %k, %index
  br i1 %left, label %ask, label %alone
ask:
  %other = call i64* @record_of(i64 %k)
  %its = call i64 @field(i64* %other, i64 $CPU)
  %same = icmp eq i64 %its, %cpu
  %k1 = add i64 %k, 1
  br i1 %same, label %move, label %look
alone:
  call void @set_field(i64* %r, i64 $CROWDED, i64 0)
  ret void
move:
  %mask = alloca i64, i64 $AFFINITY_WORDS
  br label %copy
copy:
  %j = phi i64 [0, %move], [%j1, %copy]
  %from.k = add i64 %j, $AFFINITY
  %bits = call i64 @get(i64 %from.k)
  %to = getelementptr i64, i64* %mask, i64 %j
  store i64 %bits, i64* %to
  %j1 = add i64 %j, 1
  %copied = icmp eq i64 %j1, $AFFINITY_WORDS
  br i1 %copied, label %clear.caller, label %copy
clear.caller:
  call void @clear_bit(i64* %mask, i64 %caller)
  br label %clear
clear:
  %m = phi i64 [1, %clear.caller], [%m1, %clear.one]
  %m.left = icmp ult i64 %m, %index
  br i1 %m.left, label %clear.one, label %count
clear.one:
  %m.other = call i64* @record_of(i64 %m)
  %m.its = call i64 @field(i64* %m.other, i64 $CPU)
  call void @clear_bit(i64* %mask, i64 %m.its)
  %m1 = add i64 %m, 1
  br label %clear
count:
  %n = phi i64 [0, %clear], [%n1, %count]
  %any = phi i64 [0, %clear], [%any1, %count]
  %n.p = getelementptr i64, i64* %mask, i64 %n
  %n.v = load i64, i64* %n.p
  %any1 = or i64 %any, %n.v
  %n1 = add i64 %n, 1
  %counted = icmp eq i64 %n1, $AFFINITY_WORDS
  br i1 %counted, label %decide, label %count
decide:
  %full = icmp eq i64 %any1, 0
  %full.w = zext i1 %full to i64
  call void @set_field(i64* %r, i64 $CROWDED, i64 %full.w)
  br i1 %full, label %end, label %go
go:
  %bytes = call i64 @get(i64 $affinity_bytes)
  %mask.w = ptrtoint i64* %mask to i64
  %status = call i64 @system_call(i64 $SYS_SETAFFINITY, i64 0, i64 %bytes, i64 %mask.w, i64 0, i64 0, i64 0)
  %refused = icmp ne i64 %status, 0
  %refused.w = zext i1 %refused to i64
  call void @set_field(i64* %r, i64 $CROWDED, i64 %refused.w)
  %new.i = call i32 @get_cpu()
  %new = sext i32 %new.i to i64
  call void @set_field(i64* %r, i64 $CPU, i64 %new)
  br label %end
end:
  ret void
}

define internal void @clear_bit(i64* %mask, i64 %bit) {
  %known = icmp ult i64 %bit, $AFFINITY_BITS
  br i1 %known, label %clear, label %end
clear:
  %k = lshr i64 %bit, 6
  %within = and i64 %bit, 63
  %one = shl i64 1, %within
  %keep = xor i64 %one, -1
  %p = getelementptr i64, i64* %mask, i64 %k
  %v = load i64, i64* %p
  %cleared = and i64 %v, %keep
  store i64 %cleared, i64* %p
  br label %end
end:
  ret void
}

; The function of a worker's thread.
define i64 @whet_worker_thread(i64 %record) {
  %r = inttoptr i64 %record to i64*
  call void @enter(i64 %record)
  br label %begin
begin:
  %start = call i64 @now()
  %spin = call i64 @get(i64 $spin_ns)
  %limit = add i64 %start, %spin
  br label %look
look:
  %i = phi i64 [0, %begin], [%i1, %again]
  %part = call i64 @claim()
  %none = icmp slt i64 %part, 0
  br i1 %none, label %wait, label %run
run:
  call void @run_part(i64* %r, i64 %part)
  br label %begin
wait:
  %i1 = add i64 %i, 1
  %check = call i1 @spin(i64 %i, i64 32)
  br i1 %check, label %slow, label %again
again:
  br label %look
slow:
  %stop = call i64 @get(i64 $stop)
  %ends = icmp ne i64 %stop, 0
  br i1 %ends, label %end, label %place
place:
  call void @leave_shared_cpu(i64* %r)
  %given = call i32 @yield()
  %crowded = call i64 @field(i64* %r, i64 $CROWDED)
  %shares = icmp ne i64 %crowded, 0
  %time = call i64 @now()
  %late = icmp sgt i64 %time, %limit
  %leaves = or i1 %shares, %late
  br i1 %leaves, label %sleep, label %again
sleep:
  %seen = call i64 @get(i64 $wake)
  %before = call i64 @add(i64 $sleeping, i64 1)
  %v = call i64 @get(i64 $claim)
  %left = call i1 @has_part(i64 %v)
  %stop2 = call i64 @get(i64 $stop)
  %ends2 = icmp ne i64 %stop2, 0
  %stay = or i1 %left, %ends2
  br i1 %stay, label %awake, label %doze
doze:
  call void @set_field(i64* %r, i64 $CPU, i64 -1)
  call void @futex(i64 $wake, i64 128, i64 %seen)
  br label %awake
awake:
  %after = call i64 @add(i64 $sleeping, i64 -1)
  call void @leave_shared_cpu(i64* %r)
  br label %begin
end:
  ret i64 0
}
"""


def emit_pool_ir(machine: str) -> str:
    """The module for a `machine` (x86_64 or aarch64). whet_pool_set(address of the table) comes first."""
    futex, set_affinity = _FUTEX[machine]
    declare, pause = _PAUSE[machine]
    fields = {"PART": _PART, "TEAM": _TEAM, "CPU": CPU, "INDEX": INDEX, "OUTER_PART": _OUTER_PART, "OUTER_TEAM": _OUTER_TEAM, "DEPTH": _DEPTH}
    numbers = WORDS | fields | {f"LOOP{k}": _LOOP + k for k in range(5)} | {
        "CROWDED": _CROWDED, "RECORD": RECORD, "RECORDS": RECORDS, "AFFINITY": AFFINITY, "AFFINITY_WORDS": AFFINITY_WORDS,
        "AFFINITY_BITS": 64 * AFFINITY_WORDS, "SYS_FUTEX": futex, "SYS_SETAFFINITY": set_affinity,
    }  # fmt: skip
    text = Template(_TEXT).substitute({"declare_pause": declare, "pause": pause, **{k: str(v) for k, v in numbers.items()}})
    return text + "".join(_emit_wrapper(name, kind, EXTERNAL[name]) for name, kind in _FUNCTIONS.items())


def _emit_wrapper(name: str, kind: str, word: int) -> str:
    """A function of the module that calls the one whose address is in `word`."""
    result, _, arguments = kind.rstrip(")").partition(" (")
    types = [t for t in arguments.split(", ") if t]
    named = ", ".join(f"{t} %a{k}" for k, t in enumerate(types))
    call = f"call {result} %f({named})"
    last = f"  {call}\n  ret void" if result == "void" else f"  %v = {call}\n  ret {result} %v"
    return (
        f"\ndefine internal {result} @{name}({named}) {{\n  %w = call i64 @get(i64 {word})\n  %f = inttoptr i64 %w to {kind}*\n{last}\n}}\n"
    )
