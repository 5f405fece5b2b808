"""Small faults that the suite has to find: `uv run python tests/mutants.py [--tree FOLDER] [NAME ...]`.

Each mutant takes away one thing that a promise rests on, such as an fsync, a checksum, a lock, a comparison
or a mask. It is put into a copy of the tree, and the test files that should find it run there. Prints which
ones were killed and, with --json, the same as one object; the exit code is 1 if one survived. Each is found
by its function, wherever in src/ that is, so it outlives moves of files. The soak tier tries all of them
(tests/unit/test_mutants.py).
"""

import argparse
import ast
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef
SECONDS = 900
"""For the tests of one mutant."""


@dataclass(frozen=True)
class Mutant:
    """One fault. function: qualified name; old: text that is in it once; tests: files, by their stems."""

    name: str
    function: str
    old: str
    new: str
    tests: str


class NotFound(Exception):
    """The text of a mutant is nowhere, or in more than one place."""


M = Mutant
MUTANTS = (
    # Connections
    M(
        "whoever connects has to know the token",
        "_admits",
        'if not hmac.compare_digest(take(link, NONCE, until), _proof(token, b"client", theirs, mine)):',
        "if not take(link, NONCE, until):",
        "test_strangers",
    ),
    M(
        "an answer is no proof for the other side",
        "_proof",
        "side + first + second",
        "first + second",
        "test_strangers",
    ),
    M(
        "who keeps others waiting is sent away",
        "_accept",
        "if len(self._strangers) >= STRANGERS:",
        "if self._is_closed:",
        "test_strangers",
    ),
    # Branches
    M(
        "a branch's file goes over flags",
        "with_branch",
        "over=[*arguments.over, branch]",
        "layers=[*arguments.layers, branch]",
        "test_branches",
    ),
    M(
        "what branches share can't be given to one of them",
        "with_branch",
        "if path[: len(own)] == own:",
        "if path == ():",
        "test_branches",
    ),
    M(
        "what follows from other settings does not count as given",
        "BaseConfig.deriving",
        "set(self.model_fields_set)",
        "set(made.model_fields_set)",
        "test_slurm",
    ),
    M(
        "the deadline of all branches is that of each",
        "RunDirectory.end_with",
        "self._end_by(content.time)",
        "pass",
        "test_preemption",
    ),
    M(
        "a server that branches share has what any of them needs",
        "serving_all",
        "return_experts=any(one.inference.return_experts for one in each.values()),",
        "",
        "test_branches",
    ),
    M(
        "a choice that is on record is not made again",
        "Branches.choose",
        "if any(choice.step == step for choice in states.choices):",
        "if step < 0:",
        "test_branches",
    ),
    M(
        "both branches' steps count as the age of a shared answer",
        "Siblings.answer",
        "left = self._bound - (step - 1 - self._since)",
        "left = self._bound",
        "test_branches",
    ),
    M(
        "a shared answer ages with each step of its policy",
        "mirrored",
        "return 2 * since - step",
        "return since",
        "test_branches",
    ),
    M(
        "answers that are sampled otherwise are not shared",
        "Siblings._fits",
        "and _settings(ours) == _settings(theirs)",
        "",
        "test_branches",
    ),
    M(
        "a shared answer is in the own ledger",
        "Siblings.answer",
        "self._ledger.share(group, SharedFrom(whose, self._since))",
        "group.shared = SharedFrom(whose, self._since)",
        "test_branches",
    ),
    M(
        "what other branches may take outlives the checkpoint",
        "Ledger.fold",
        'doomed = "SELECT place FROM groups WHERE batch > ? AND batch <= ?"',
        'doomed = "SELECT place FROM groups WHERE batch > min(?, 0) AND batch <= ?"',
        "test_branches",
    ),
    M(
        "policies of another run stay loaded",
        "too_many",
        "own = [one for one in loaded if run_of(one.version) == whose]",
        "own = list(loaded)",
        "test_unmerged",
    ),
    # The service
    M(
        "a call that is sent again is told from another one of its number",
        "ServiceLedger.add",
        "if before.digest != call.digest:",
        "if before.digest is call:",
        "test_service",
    ),
    M(
        "calls of a model are taken in their order",
        "ServiceLedger._check_turn",
        "if call.seq != expected:",
        "if call.seq < expected:",
        "test_service",
    ),
    M(
        "a tenant does not see models of others",
        "ServiceLedger.model",
        "if not found or tenant not in (None, found[0].tenant):",
        "if not found:",
        "test_service",
    ),
    M(
        "gradients on their way to an update are computed again",
        "CallWorker._taken_up",
        "(call.seq > at or call.kind == PASS)",
        "call.seq > at",
        "test_service",
    ),
    M(
        "what a failed update has dropped stays dropped",
        "CallWorker._change",
        "model.drop_gradients()  # as when the call is computed again",
        "pass",
        "test_service",
    ),
    M(
        "models of a client that is away count no more",
        "ServiceLedger.leave_session",
        '"UPDATE sessions SET away = 1 WHERE id = ?"',
        '"UPDATE sessions SET away = 0 WHERE id = ?"',
        "test_service",
    ),
    M(
        "a heartbeat keeps a client",
        "SessionWatch.leave_silent",
        "if now - sign <= self._timeout:",
        "if now - sign < 0:",
        "test_service",
    ),
    M(
        "a model that leaves the memory is saved first",
        "CallWorker._leave",
        "if resident is None or any(",
        "if resident is not None or any(",
        "test_service",
    ),
    M(
        "dro keeps tokens without an advantage near their sampler",
        "Dro.__call__",
        "torch.where(inputs.micro.loss_mask[:, 1:], values, 0.0)",
        "torch.where(inputs.mask, values, 0.0)",
        "test_service",
    ),
    M(
        "a worker gets the weights that a model has now",
        "PassHelper.ask",
        "if self._has.get(kind) is not model.values:",
        "if kind not in self._has:",
        "test_service",
    ),
    M(
        "the gradients of all shares count",
        "ClientModel.compute",
        "self._add(one.gradients)",
        "self._add(one.gradients if one is answers[0] else {})",
        "test_service",
    ),
    # Steps in memory
    M(
        "a step in memory is no longer whole before its bytes change",
        "MemorySteps._run",
        "os.ftruncate(fd, 0)",
        "os.fstat(fd)",
        "test_memory_steps",
    ),
    M(
        "bytes in memory are compared with what was copied",
        "_as_step",
        "check_content(step, {name: manifest.files[name] for name in copied})",
        "pass",
        "test_memory_steps",
    ),
    M(
        "parts of two starts of the ranks are no step",
        "receipt_id",
        'f"{session}:{step}"',
        'f"{step}"',
        "test_memory_steps",
    ),
    M(
        "the step that ranks went on from is spared",
        "MemorySteps.prepare",
        "1 - SLOTS.index(resumed.slot)",
        "SLOTS.index(resumed.slot)",
        "test_memory_steps",
    ),
    M(
        "a step waits for the copy of the one before",
        "MemorySteps.before_update",
        "self._copied.wait()",
        "self._copied.is_set()",
        "test_memory_steps",
    ),
    M(
        "no step takes the place of one that has copies while the next is on its way",
        "MemorySteps.keep",
        "if self._given_up or not self._may_take():",
        "if self._given_up:",
        "test_memory_nodes",
    ),
    M(
        "a part of a step may come from the memory of another node",
        "OwnedMemory._take",
        'self._taken[slot] = receive(link)["notes"]',
        "receive(link)",
        "test_memory_nodes",
    ),
    M(
        "who does not know the run's token gets nothing from a node's memory",
        "_admits",
        "return False",
        "pass",
        "test_memory_nodes",
    ),
    M(
        "a step that ranks could not load is passed over",
        "start_in_memory",
        "if record.id in unreadable:",
        "if record.id in ():",
        "test_memory_nodes",
    ),
    M(
        "the memory of all nodes goes with the launcher",
        "main",
        "ends.append(anchor.fileno())",
        "pass",
        "test_memory_nodes",
    ),
    # A package to build on
    M(
        "a name that stands for two things is refused",
        "_plug_in",
        "if found and len(places) > 1:",
        "if not found and len(places) > 1:",
        "test_extensions",
    ),
    M(
        "the code of a plug-in stands in the recipe",
        "code_of",
        'name = f"{plug_in.module}:{plug_in.attr}"',
        "pass",
        "test_extensions",
    ),
    M(
        "what a server refuses is not part of the conversation",
        "Conversing.say",
        "self._messages.pop()",
        "pass",
        "test_chat",
    ),
    # What servers hold
    M(
        "only a server's first update is compared with its start",
        "StartWeights.begin_update",
        "files, self._files = self._files, []",
        "files = self._files",
        "test_held_weights",
    ),
    M(
        "a sum that is too large is no value that is not finite",
        "look_at",
        "if not is_finite and tensor.dtype == dtype:",
        "if not is_finite and tensor.dtype is None:",
        "test_staging",
    ),
    M(
        "values that the server rounds are looked at one by one",
        "look_at",
        "piece.aminmax() if tensor.dtype != dtype else [piece.sum()]",
        "[piece.sum()]",
        "test_staging",
    ),
    # Where answers go on
    M(
        "an answer goes where its prompt's newest request went",
        "Sessions.choose",
        "session = (affinity, numbers[0]) if len(numbers) == 1 else None",
        "session = None",
        "test_sessions",
    ),
    # Steps taken again
    M(
        "bits that differ are values that differ",
        "_as_bits",
        "return values.view(sizes[values.element_size()])",
        "return values.nan_to_num()",
        "test_replay",
    ),
    M(
        "what must be equal may be rounded",
        "Comparison.verdict",
        "row.column in COMPUTED and ",
        "",
        "test_replay",
    ),
    M(
        "steps are taken again with the settings of today",
        "RecordedRun.settings",
        '_put(settings, name.split("."), value)',
        "pass",
        "test_replay",
    ),
    M(
        "a kept batch of steps that are taken again stays",
        "RunDirectory.set_batches_aside",
        "if step > attempt.start_step]",
        "if step > attempt.start_step + 9]",
        "test_replay",
    ),
    # Answers asked for again
    M(
        "an answer that its seed does not draw is as good",
        "SpanReplayed.verdict",
        "if self.parted is None and not any(self.apart)",
        "if not any(self.apart)",
        "test_replayed_answers",
    ),
    M(
        "tokens on an earlier policy's keys and values are compared",
        "spans_of",
        'mixed=then.keeps_cache and span["version"] != first',
        "mixed=False",
        "test_replayed_answers",
    ),
    M(
        "a server has kept whatever an answer's requests have in common",
        "_go_on",
        "kept = [common] if not span.begins else sorted({0, *(common // size * size for size in BLOCKS)})",
        "kept = [common]",
        "test_mixed_answers",
    ),
    M(
        "the keys that were tried last are those of the answer",
        "_go_on",
        "branch.tokens, branch.cache = fed, cache",
        "branch.tokens, branch.cache = fed, tried",
        "test_mixed_answers",
    ),
    M(
        "a step that was to be saved is gone on from although the one before is in memory",
        "start_in_memory",
        "(not one.is_owed, one.step)",
        "one.step",
        "test_memory_steps",
    ),
    M(
        "a step that was to be saved is gone on from although the one before is a checkpoint",
        "start_in_memory",
        "record.step == start.start_step + 1",
        "record.step < start.start_step",
        "test_memory_steps",
    ),
    M(
        "a checkpoint has the policy of a branch that was left",
        "is_same_policy",
        "int(one[1]) > int(other[1])",
        "int(one[1]) != int(other[1])",
        "test_replayed_answers",
    ),
    # Plans
    M(
        "a save that is not durable yet can be gone back to",
        "SimulatedRun._newest_on_disk",
        "if begun <= durable",
        "if begun <= self.now",
        "test_fleet_plan",
    ),
    M(
        "a save that falls due while another one is written waits",
        "SimulatedRun._begin_save",
        "max(self.now, self._busy)",
        "self.now",
        "test_fleet_plan",
    ),
    M(
        "a machine that died waits for a spare",
        "SimulatedRun._other_machine",
        "return heapq.heappop(self._repaired)",
        "return self.now",
        "test_fleet_plan",
    ),
    M(
        "steps that a save overlaps are no measure of a step",
        "_steps_and_saves",
        "if step not in overlapped]",
        "]",
        "test_fleet_plan",
    ),
    # Policies from server to server
    M(
        "a server vouches for what it hands on with its own checksums",
        "_Relaying._sent",
        "return {name: self._sums[name] for name in names}",
        "return contributions",
        "test_staging",
    ),
    M(
        "a server waits for its parent, however late that is",
        "Spreading._in_time",
        "timeout=begun.result() + allowed - self._loop.time()",
        "timeout=None",
        "test_spreading",
    ),
    # Policies through an object store
    M(
        "a damaged piece of a downloaded policy counts",
        "_Version._piece",
        " and crc64(content) == int(entry.crc64nvme[number], 16)",
        "",
        "test_deltas",
    ),
    M(
        "a server does not ask for the whole policy in the store",
        "Staging._downloaded",
        "if not has:",
        "if True:",
        "test_deltas",
    ),
    M(
        "objects of versions that are gone stay in the store",
        "PolicyStore._delete_what_is_not_needed",
        "objects.delete(",
        "list(",
        "test_deltas",
    ),
    # Servers that join
    M(
        "a server that tells no experts joins a run that replays them",
        "Membership._attach",
        "if self._settings.needs_experts and",
        "if False and",
        "test_server_pool",
    ),
    # What survives a crash, and what a reader can see
    M("atomic write without fsync", "write_atomic", "os.fsync(file.fileno())", "pass", "test_durability"),
    M(
        "atomic write in place",
        "write_atomic",
        "os.replace(temporary, path)",
        "path.write_bytes(data)",
        "test_run test_durability test_validation",
    ),
    M(
        "folder entry not synced",
        "write_atomic",
        "sync(path.parent)",
        "pass",
        "test_durability",
    ),
    M(
        "made folders not synced",
        "make_folders",
        "sync(folder.parent)",
        "pass",
        "test_run test_durability",
    ),
    M("sync does nothing", "sync", "os.fsync(fd)", "pass", "test_durability"),
    M("manifest not synced", "CheckpointStore._publish", "sync(temporary)", "pass", "test_durability"),
    M(
        "manifest under its name at once",
        "CheckpointStore._publish",
        'temporary = folder / f".{FILE_NAME}"',
        "temporary = folder / FILE_NAME",
        "test_store test_durability test_fault_points",
    ),
    M("step's folder not synced", "CheckpointStore._publish", "sync(folder)\n", "pass\n", "test_durability"),
    M(
        "manifest deleted last",
        "CheckpointStore.delete",
        "(folder / FILE_NAME).unlink()",
        "pass",
        "test_store test_retention test_fault_points",
    ),
    M(
        "steps overwritten",
        "CheckpointStore._check_free",
        "if (folder / FILE_NAME).exists():",
        "if False:",
        "test_store",
    ),
    M("leftovers stay", "CheckpointStore._remove_leftovers", "path.unlink()", "pass", "test_store"),
    M(
        "receipt of any attempt",
        "note_of",
        'content.get("attempt") == attempt',
        "content",
        "test_store test_saver",
    ),
    M(
        "linked files not compared",
        "CheckpointStore.commit",
        "if manifest.files.get(name) != entry",
        "if False",
        "test_store test_constant test_carried",
    ),
    M("writer does not sync", "Saved.save", "sync(path)", "pass", "test_durability"),
    M(
        "writer does not read back",
        "_check_disk",
        "!= checksums[name].crcs",
        "is None",
        "test_saver test_writer",
    ),
    M(
        "adopted files not checked",
        "CheckpointStore.adopt.copy",
        "check_files(folder, manifest)",
        "pass",
        "test_store",
    ),
    # Checksums
    M(
        "content not compared",
        "check_files",
        "check_content(folder, wanted, on_bytes=on_bytes)",
        "pass",
        "test_manifest test_store test_damaged_files",
    ),
    M(
        "unknown files allowed",
        "check_files",
        'raise Damaged(f"{folder / unknown[0]}: does not belong to the checkpoint")',
        "pass",
        "test_manifest test_store",
    ),
    M("paths lead out of a step", "Manifest._stay_inside", '".." not in path.parts', "True", "test_manifest"),
    M(
        "keys repeated in a manifest",
        "refuse_repeated_keys",
        "len(content) != len(pairs)",
        "False",
        "test_manifest test_hostile_sources",
    ),
    M(
        "CRC of the last bytes left out",
        "FileChecksum.add_crc",
        "end - offset - nbytes",
        "0",
        "test_checksums test_manifest test_store",
    ),
    M(
        "CRC of a span joined wrongly",
        "SpanSum.add",
        "self.nbytes - high",
        "0",
        "test_checksums test_noted test_noted_calls",
    ),
    M(
        "other ranks' CRCs left out",
        "FileChecksum.merge",
        "^ crc",
        "^ 0",
        "test_checksums test_store test_saver",
    ),
    # Locks
    M(
        "run directory without lock",
        "LockedFolder.lock",
        "flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, path)",
        "pass",
        "test_run test_file_system",
    ),
    M(
        "ckpt commands without lock",
        "CheckpointStore.alone",
        "flock(fd, fcntl.LOCK_EX, path)",
        "pass",
        "test_file_system test_ckpt test_store",
    ),
    # Who may say what
    M(
        "announcement of any attempt",
        "Versions.announced",
        "message.attempt == attempt.id",
        "True",
        "test_run test_sharing",
    ),
    M(
        "hand-over of any attempt",
        "Versions.handed_over",
        "message.attempt == attempt.id",
        "True",
        "test_run test_sharing",
    ),
    M(
        "trainer's turn one step too long",
        "Versions.may_train",
        "step <= turn.until",
        "step <= turn.until + 1",
        "test_run test_sharing",
    ),
    M(
        "a step without waking the backend",
        "ShippedBatches.next_batch",
        "self.sharing.begin()",
        "pass",
        "test_sharing",
    ),
    M(
        "prefix of a newer attempt taken",
        "Claims.claim",
        "newest > _number(attempt)",
        "False",
        "test_remote_store test_remote_parts",
    ),
    M(
        "uploads by a stale attempt",
        "Claims.check_owner",
        'found.get("owner") != owner',
        "False",
        "test_remote_store test_remote_parts",
    ),
    M(
        "completed upload completed again",
        "Sent._take",
        'self.uploads.pop(row["file"], None)',
        "pass",
        "test_remote_parts test_remote_store",
    ),
    # Retention
    M(
        "newest step not kept",
        "reasons_to_keep",
        'reasons[numbers[-1]].append("newest")',
        "pass",
        "test_retention",
    ),
    M(
        "pins forgotten",
        "reasons_to_keep",
        'reasons[number].append("pin")',
        "pass",
        "test_retention test_ckpt",
    ),
    M(
        "worst kept as best",
        "reasons_to_keep",
        'rules.mode == "max"',
        'rules.mode == "min"',
        "test_retention",
    ),
    M("NaN among the best", "_is_number", "value == value", "True", "test_retention"),
    # Weights on their way to servers
    M(
        "altered weights served",
        "read_weights",
        "sums.get(name) != checksum",
        "False",
        "test_staging test_unmerged test_inference",
    ),
    M(
        "missing tensors served",
        "read_weights",
        "layout.shapes.keys() - weights.keys() - tied.keys()",
        "set()",
        "test_staging test_unmerged test_inference",
    ),
    # Seeds and batches
    M(
        "purpose left out of a seed",
        "derive",
        "[str(seed), *map(str, purpose)]",
        "[str(seed)]",
        "test_run test_order",
    ),
    M(
        "order without the seed",
        "permutation",
        "derive(seed, *purpose)",
        "derive(0, *purpose)",
        "test_order test_run test_pipeline",
    ),
    M(
        "loss mask left out of a digest",
        "digest_of",
        "(sample.token_ids, sample.loss_mask, *columns)",
        "(sample.token_ids, *columns)",
        "test_run test_pipeline test_losses",
    ),
    M(
        "reward lost in cutting",
        "Sample.cut",
        "columns[name][learned[-1]] += self.columns[name][length:].sum()",
        "pass",
        "test_run test_trainer test_gae test_stopping",
    ),
    M(
        "rows too full",
        "pack",
        "room[: len(tight) + 1] >= lengths[i]",
        "room[: len(tight) + 1] >= lengths[i] - 1",
        "test_trainer test_losses test_layouts",
    ),
    M(
        "tokens to learn counted with the first",
        "make_rank_batch",
        "masks[i][1 : config.seq_len]",
        "masks[i][: config.seq_len]",
        "test_trainer test_losses",
    ),
    # Losses and advantages
    M(
        "SFT learns prompts",
        "Likelihood.__call__",
        "inputs.logprobs * inputs.mask",
        "inputs.logprobs",
        "test_losses test_trainer",
    ),
    M(
        "policy loss without mask",
        "PolicyLoss.__call__",
        "-(values * mask).sum()",
        "-values.sum()",
        "test_policy_losses",
    ),
    M(
        "policy loss not by sequence",
        "PolicyLoss.__call__",
        "values / inputs.lengths.clamp(min=1)[inputs.sample_of]",
        "values",
        "test_policy_losses",
    ),
    M("clipping without upper bound", "PPOClip.objective", "1 + self.clip_high", "1e9", "test_policy_losses"),
    M(
        "maximum in place of minimum",
        "PPOClip.objective",
        "torch.minimum(ratio * advantages",
        "torch.maximum(ratio * advantages",
        "test_policy_losses",
    ),
    M(
        "pairs divided by samples",
        "PairLoss.normaliser",
        "counts.records - counts.unlearned // 2",
        "counts.samples",
        "test_preference_losses",
    ),
    M(
        "pairs without reference",
        "Answers.ratio",
        "self.logps - self.reference",
        "self.logps",
        "test_preference_losses",
    ),
    M("unlearned pairs count", "PairLoss.__call__", "> 0", ">= 0", "test_preference_losses"),
    M(
        "GRPO without standard deviation",
        "Grpo.__call__",
        "statistics.stdev(rewards) if self.normalize else 1.0",
        "1.0",
        "test_advantages",
    ),
    M(
        "RLOO with the answer itself",
        "Rloo.__call__",
        "(total - reward) / others",
        "total / (others + 1)",
        "test_advantages",
    ),
    M(
        "GAE without lambda",
        "estimate",
        "gamma * gae_lambda * advantages",
        "gamma * advantages",
        "test_gae test_critic",
    ),
    M("variance of a step by n", "moments", "max(count - 1, 1.0)", "max(count, 1.0)", "test_gae test_critic"),
    # Ranks that share the tokens of rows
    M(
        "a learned token where it stands, not where it is predicted",
        "part_of_rows",
        "predicting = micro.learned - 1",
        "predicting = micro.learned",
        "test_attention",
    ),
    M(
        "added tokens not apart from the row's last sample",
        "widened",
        "added = torch.arange(missing, device=device)",
        "added = torch.arange(1, missing + 1, device=device)",
        "test_attention",
    ),
    M(
        "a window that rows on several ranks forget",
        "masks_of_rows",
        "seen if window is None else seen & (before < window)",
        "seen",
        "test_attention",
    ),
    M(
        "gradients that do not go back to the rank with the tokens",
        "_Exchange.backward",
        "dist.all_to_all_single(of_sent, of_received.contiguous(), group=ctx.axis.group)",
        "of_sent.copy_(of_received)",
        "test_step_ranks",
    ),
    # Ranks that share the matrices of layers
    M(
        "a rank's part of the gradient of a norm of heads taken for all of it",
        "TensorParallel.norm_and_clip",
        "if one in _PARTIAL",
        "if False",
        "test_step_ranks",
    ),
    M(
        "values that several ranks hold counted as often in the norm",
        "copies_of",
        "return copies",
        "return 1",
        "test_step_ranks",
    ),
    M(
        "gradients of own tokens alone in the layers",
        "_MeanGradient.backward",
        "dist.all_reduce(summed, group=ctx.axis.group)",
        "pass",
        "test_step_ranks",
    ),
    # megatron-core
    M(
        "tokens that see later ones where samples are attended to one after the other",
        "one_after_another",
        "is_causal=True",
        "is_causal=False",
        "test_attention",
    ),
    M(
        "values in several places read into a copy alone",
        "RowTargets.finish",
        "piece.values.copy_(values)",
        "pass",
        "test_megatron_training",
    ),
    M(
        "each rank's columns taken for the first ones",
        "stretches_of",
        "row * cut.size + cut.rank",
        "row * cut.size",
        "test_megatron_training",
    ),
    M(
        "the token that pads learned where it is looked up",
        "looked_up",
        "embeddings.detach(), embeddings",
        "embeddings, embeddings",
        "test_megatron_training",
    ),
    M(
        "a tied embedding written by the last stage as well",
        "scattered",
        "copies[stretch.name] = None",
        "pass",
        "test_megatron_training",
    ),
    M(
        "samples dealt to ranks as if all had the same stage",
        "RankLayout.of",
        "rank % of_stage",
        "rank",
        "test_megatron_training",
    ),
    # Experts that servers chose
    M(
        "a later answer does not ask for the experts of the token before it",
        "Completer.experts_from",
        "max(before - 1, 0)",
        "before",
        "test_routed_experts",
    ),
    M(
        "a router that chooses by itself",
        "_Choice.__torch_function__",
        "torch.where(recorded >= 0, recorded, own)",
        "own",
        "test_router_replay",
    ),
    M(
        "the experts of a row's first tokens, on whatever rank",
        "_part_of_columns",
        "values[:, first : first + count]",
        "values[:, :count]",
        "test_router_replay",
    ),
    # Ranks that share matrices
    M(
        "the learned tokens of a row's part that are not divided among ranks that share matrices",
        "_divided",
        "places=part.places[first:end], own=own[first:end]",
        "places=part.places, own=own",
        "test_step_ranks",
    ),
    M(
        "adapters cut by the other of their matrices",
        "plan_of",
        "== 0 else",
        "== 1 else",
        "test_step_ranks",
    ),
    M(
        "gradients of experts divided by ranks that share matrices, too",
        "deal_out",
        "group.world_size / group.tensor.size",
        "float(group.world_size)",
        "test_step_ranks",
    ),
    M(
        "a balance of experts that counts once for each rank that shares matrices",
        "Balance.added_to",
        "of_batch * ranks / self._same",
        "of_batch * ranks",
        "test_step_ranks",
    ),
    # Ranks that have experts together
    M(
        "gradients of experts divided by the ranks with the same ones alone",
        "deal_out",
        "unit.set_gradient_divide_factor(group.world_size / group.tensor.size)",
        "pass",
        "test_step_ranks",
    ),
    M(
        "sums of one shard forced, which FSDP2 divides twice",
        "deal_out",
        'group.device.type == "cpu" and shards > 1',
        'group.device.type == "cpu"',
        "test_step_ranks",
    ),
    M(
        "weights of routing rounded on their way into experts",
        "deal_out",
        "cast_forward_inputs=False",
        "cast_forward_inputs=True",
        "test_step_ranks",
    ),
    M(
        "experts left uneven on the ranks that have the same ones",
        "sharded_dimension",
        "return 1 if not even and len(shape) > 2 and shape[1] % shards == 0 else 0",
        "return 0",
        "test_estimate",
    ),
    # Sinks: nothing twice, nothing left out, nobody held up
    M(
        "a sink does not remember rows",
        "Follower.look",
        "self._rows.add(new)",
        "self._rows._digests += [digest(row) for row in new]",
        "test_sinks",
    ),
    M(
        "a sink keeps rows that were taken back",
        "Follower.look",
        "if kept < len(self._rows):",
        "if False:",
        "test_sinks",
    ),
    M(
        "a webhook without a deadline",
        "_closed_after",
        "timer.start()",
        "pass",
        "test_sinks",
    ),
    M(
        "a killed launcher is not noted",
        "note_killed",
        'view.run.history.ended(attempt, "killed", step=rows[-1]["step"] if rows else 0, reason=reason)',
        "pass",
        "test_sinks",
    ),
    M("tracebacks repeat", "OnlyOnce.filter", "== 1:", ">= 1:", "test_logs"),
    # Use of GPUs, and what is said first of a run that does not learn
    M("every token uses all experts", "model_flops", "share = active", "share = 1.0", "test_utilisation"),
    M("attention is not causal", "_pairs", "full * (full + 1) // 2", "full * full", "test_utilisation"),
    M("a slice of a GPU is a GPU", "peak_of", "OTHERS.isdisjoint(words)", "True", "test_utilisation"),
    M(
        "redraw where no prompt has a spread",
        "NothingLearned._advice",
        "if some",
        "if True",
        "test_diagnosis",
    ),
    M("a failed run says no more", "after_failure", "diagnose {here}", "", "test_endings"),
    # What became of time, tokens and problems, and what a copy of a run says
    M("waiting for a server is useful", "starting", "- generate -", "- 1e9 -", "test_watch"),
    M(
        "dropped tokens are forgotten",
        "Ledger._throw",
        'self._database.execute(THROW.format("place = ?"), (step, fate, place))',
        "pass",
        "test_pipeline test_ledger",
    ),
    M("flips the wrong way", "flips_of", "one.before < RIGHT <=", "one.after < RIGHT <=", "test_page"),
    M(
        "a copy was killed",
        "RunSnapshot._by_history",
        '("state"), "unknown")',
        '("state"), "killed")',
        "test_view",
    ),
    # Who may look at a run
    M(
        "page without its token",
        "TokenGuard._refused",
        "not hmac.compare_digest(given, self._token)",
        "not given",
        "test_page",
    ),
    M("page for any host", "TokenGuard._refused", "_name_of(hosts[0]) not in HOSTS", "False", "test_page"),
    M("page for any method", "TokenGuard._refused", 'scope["method"] != "GET"', "False", "test_page"),
    M("page for other machines", "listen", "(HOST, one)", '("", one)', "test_page"),
    M("page runs what a run names", "advantages", "settings.type in BUILT_IN", "True", "test_page"),
)


@functools.cache
def functions(text: str) -> list[tuple[str, Function]]:
    """All functions of a module, given by its text, with their qualified names."""

    def within(node: ast.AST, name: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                qualified = f"{name}.{child.name}".lstrip(".")
                if not isinstance(child, ast.ClassDef):
                    yield qualified, child
                yield from within(child, qualified)
            else:
                yield from within(child, name)

    return list(within(ast.parse(text), ""))


def place(mutant: Mutant, sources: Path) -> tuple[Path, str]:
    """The file that a mutant changes, and the file's new text.

    The text is looked for in functions of the name, among them in those of a class of the name and, if the
    function has another name by now, in all functions.

    Raises:
        NotFound: the text is in no function, or in several.
    """
    last, owner = mutant.function.split(".")[-1], mutant.function.split(".")[0]
    found: dict[tuple[str, Path, int], str] = {}
    for file in sorted(sources.rglob("*.py")):
        text = file.read_text()
        if mutant.old.strip() not in text:
            continue
        lines = text.splitlines(keepends=True)
        for name, node in functions(text):
            body = "".join(lines[node.lineno - 1 : node.end_lineno])
            if body.count(mutant.old) == 1:
                body = body.replace(mutant.old, mutant.new)
                changed = [*lines[: node.lineno - 1], body, *lines[node.end_lineno :]]
                found[name, file, node.lineno] = "".join(changed)
    for is_meant in (
        lambda name: name.split(".")[-1] == last,
        lambda name: name.split(".")[0] == owner,
    ):
        meant = {key: text for key, text in found.items() if is_meant(key[0])}
        found = meant or found
    if len({(file, text) for (_, file, _), text in found.items()}) != 1:
        places = ", ".join(f"{file}: {name}" for name, file, _ in found) or "nowhere"
        raise NotFound(f"{mutant.name}: {mutant.old!r} of {mutant.function}: {places}")
    ((_, file, _), text) = next(iter(found.items()))
    ast.parse(text)
    return file, text


def files_of(mutant: Mutant, tree: Path) -> list[str]:
    """The files of its tests that are there."""
    return [
        str(file.relative_to(tree))
        for name in mutant.tests.split()
        for file in sorted((tree / "tests").rglob(f"{name}.py"))
    ]


def copy_of(tree: Path, folder: Path) -> Path:
    """A copy of a tree's files that git knows, in which the package cairn is the copy's."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        source, target = tree / name, folder / name
        if source.is_file() and not source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    if not (folder / "cairn").exists():
        (folder / "cairn").symlink_to("src")
    return folder


def is_killed(mutant: Mutant | None, tree: Path, files: list[str]) -> bool:
    """Whether tests of a tree fail with the mutant; without one, whether they fail as it is."""
    before: tuple[Path, str] | None = None
    if mutant is not None:
        file, text = place(mutant, tree / "src")
        before = file, file.read_text()
        file.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    finally:
        if before is not None:
            before[0].write_text(before[1])
    if process.returncode not in (0, 1, 2):
        raise RuntimeError(
            f"pytest ended with {process.returncode}:\n{output.decode(errors='replace')[-2000:]}"
        )
    return process.returncode != 0


def main() -> int:
    """Try mutants; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="put small faults into the code, and see which the tests find"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants (default: all)")
    parser.add_argument(
        "--tree", type=Path, default=REPOSITORY, help="the clone to try them in (default: this)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the result as one object on the last line")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    results: dict[str, str] = {}

    def work(mutants: list[Mutant]) -> None:
        with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
            tree = copy_of(options.tree, Path(folder))
            for mutant in mutants:
                began = time.monotonic()
                try:
                    files = files_of(mutant, tree)
                    if not files:
                        raise NotFound(f"{mutant.name}: no tests are there of {mutant.tests}")
                    results[mutant.name] = "killed" if is_killed(mutant, tree, files) else "survived"
                except NotFound as error:
                    results[mutant.name] = "not found"
                    print(error, file=sys.stderr)
                print(
                    f"{results[mutant.name]:9} {time.monotonic() - began:5.0f} s  {mutant.name}", flush=True
                )

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, [chosen[number :: options.jobs] for number in range(options.jobs)]))
    killed = sum(result == "killed" for result in results.values())
    print(f"{killed} of {len(results)} mutants killed")
    if options.json:
        print(json.dumps(results))
    return int(killed < len(results))


if __name__ == "__main__":
    sys.exit(main())
