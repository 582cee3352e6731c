"""The one list of causes: stable identifiers that findings, tests, docs and benchmarks share.

Each entry says what the fault is and what usually mends it. ``docs/findings.md`` is written from this table.
"""

# ruff: noqa: E501  # one cause a row reads as a table

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """One fault the doctors know.

    Attributes:
        id: ``family.name``; never changes once published.
        title: What is wrong, as a noun phrase.
        remedy: What usually mends it, one sentence.
    """

    id: str
    title: str
    remedy: str

    @property
    def kind(self) -> str:
        """The family: the ``kind`` of findings with this cause."""
        return self.id.split(".", 1)[0]


_TABLE = """
leak.graph_total | A running total keeps the autograd history of every step | Add loss.item() or loss.detach() to the total.
leak.graph_kept | Tensors with their autograd graph are collected | Keep .detach() or .item(), or run inference under torch.no_grad().
leak.carried_state | A state is carried to the next step with its history | Detach the state between steps.
leak.create_graph | Gradients hold the graph that made them (create_graph) | Use torch.autograd.grad, or zero_grad(set_to_none=True) after the step.
leak.hook_buffer | A hook collects activations | Clear what the hook stores each step, or remove the hook.
leak.backward_hook | Backward hooks keep gradients of activations | Remove the hook, or let it keep numbers only.
leak.module_attribute | Module attributes hold activations that nothing clears | Delete the attributes.
leak.cache_carried | A cache is carried from step to step and grows | Pass use_cache=False in training and drop the cache.
leak.kept_tensors | Tensors are collected step after step | Keep numbers, or clear the container.
leak.per_phase | Something grows once per evaluation or epoch | Reset the metric at the end of each evaluation.
leak.parameters_added | Parameters are added while training | Merge, delete or unload adapters that no longer train.
leak.worker_memory | Loader workers copy a data set of Python objects | Keep the rows in numpy or Arrow, or use fewer workers.
leak.steady_growth | Memory at rest grows and no holder was found | Look for what is stored each step.
memory.bounded_buffer | A buffer that fills up to a limit | Nothing to do.
memory.warm_up | Memory rose at first and stayed level | Nothing to do.
memory.longer_batch | The peak follows the longest batch | Cap the length, or run the longest batch first.
memory.fragmentation | Reserved memory far above what is allocated | Set expandable_segments:True before torch is imported.
memory.cycle | Dead objects wait for the garbage collector | gc.collect() frees them.
memory.clean | Nothing leaks | Nothing to do.
release.exception | The last exception holds the frames and their locals | workbench.release() clears it.
release.exception_chain | A chained exception holds frames of its own | Clear the whole chain of __context__ and __cause__.
release.trainer | A trainer or accelerator still refers to the model | Delete the trainer too, or call accelerator.free_memory().
release.registry | A registry holds objects of earlier runs | Empty the registry before the next run.
release.cycle | A reference cycle waits for the garbage collector | Break the cycle or call gc.collect().
release.output_history | The notebook's output history holds a displayed tensor | Run %reset -f out, or end such lines with a semicolon.
release.optimizer | The optimizer holds the parameters and its moments | Delete the optimizer with the model.
release.variable | A variable still holds tensors | Delete the variable.
release.idle_adapters | Adapters that are not active stay loaded | Call delete_adapter for those you no longer need.
oom.optimizer_state | The optimizer made its state and memory ran out | Use an 8-bit or paged optimizer, or train fewer parameters.
oom.longest_batch | A longer batch than any before | Cap the length or use a token budget.
oom.grouped_long_rows | Grouping by length put the longest rows together | Use a token budget per batch.
oom.row_not_truncated | A row is longer than the maximum: it was not truncated | Truncate in the collator or drop the row.
oom.loss_logits | The peak is in the loss: copies of the logits | Use a chunked or fused loss, or a shorter length.
oom.activations | Activations fill the memory | Use gradient checkpointing or a smaller micro-batch.
oom.evaluation | The evaluation needs more than training | Lower per_device_eval_batch_size or keep only argmax.
oom.evaluation_logits | The evaluation keeps the logits of the whole set | Reduce them in preprocess_logits_for_metrics.
oom.evaluation_host | Logits kept in host memory will fill it | Use batch_eval_metrics or reduce the logits.
oom.evaluation_hidden_states | The evaluation keeps all hidden states | Set output_hidden_states=False or name them in ignore_keys.
oom.resume_two_copies | Two copies of the optimizer state while resuming | Load the checkpoint with map_location='cpu'.
oom.save | Memory ran out while saving | Save the adapter only, or gather the state on the CPU.
oom.fragmentation | Free memory lies in pieces that are too small | Turn on expandable segments, or make the batches equally long.
oom.other_process | Another process fills the device | End the other process, or take another device.
oom.weights | The weights do not fit | Quantise the base or choose a smaller model.
oom.other | Memory ran out | Make the micro-batch smaller with more accumulation.
nonfinite.fp16_overflow | A value beyond 65504 overflowed in float16 | Use bfloat16, or float32 for this module.
nonfinite.fp16_attention | Attention scores overflowed in float16 | Use attn_implementation='sdpa' or bfloat16.
nonfinite.fp16_log_probs | Log-probabilities were taken of float16 logits | Upcast the logits to float32.
nonfinite.backward_overflow | The forward is finite, a gradient overflows | Keep the weights in bfloat16 or float32.
nonfinite.backward_singular | The derivative is not finite where the function is | Add an epsilon inside the root or mask before the function.
nonfinite.log_of_zero | Logarithm or division of zero | Use the stable form, e.g. F.logsigmoid.
nonfinite.masked_attention | Softmax over rows that are fully masked | Unmask one key per row.
nonfinite.summed_masks | Two additive masks were summed to -inf | Build one boolean mask.
nonfinite.hidden_by_filter | The log shows 0 or an average where the loss is NaN | Set logging_nan_inf_filter=False and go back to a good checkpoint.
nonfinite.scaler_fp16_weights | Trainable weights are float16 under a gradient scaler | Cast trainable parameters to float32.
nonfinite.scaler_fp16_saved_modules | Modules trained whole are float16 under a gradient scaler | Cast these modules to float32.
nonfinite.clipping | Clipping with a norm that is not finite | Use error_if_nonfinite=True or skip the step.
nonfinite.clip_no_op | The norm overflowed and clipping zeroed every gradient | Skip the step and look at the batch.
nonfinite.optimizer_update | Gradients are finite, the update is not | Keep weights and state in float32; raise eps.
nonfinite.learning_rate | The weights blew up at this learning rate | Lower the learning rate.
nonfinite.weights_before | The weights were bad before this run | Load a good checkpoint.
nonfinite.embedding_row | An embedding row is NaN | Set the row to the mean row or avoid the token.
nonfinite.labels | No token of the batch is supervised | Raise max_length or drop such rows.
nonfinite.data_row | The data holds NaN or Inf | Drop or mend the row.
nonfinite.logging_only | Only the logged average is not finite | Mend the logger.
nonfinite.loss | The loss of a step was NaN or Inf | Lower the learning rate, or watch the loop to see where it began.
nonfinite.gradient | The gradient norm of a step was NaN or Inf | Lower the learning rate, or use bf16 instead of fp16.
nonfinite.other | A value became NaN or Inf | See the operator and the module named.
loss.exactly_zero | The loss is exactly 0 | See how many tokens are supervised.
loss.frozen | The loss does not change | See whether the trained parameters are in the optimizer.
loss.outlier_batch | One batch with a huge gradient changed the weights | Set max_grad_norm=1.0.
loss.spikes | The loss of single steps stands out again and again | Look at the training samples it names; skip or damp such steps with policies.on_spike.
data.no_supervised_tokens | Rows have no supervised token after truncation | Raise max_length or drop these rows.
data.no_generation_markers | The chat template has no generation markers | Use a template with generation blocks.
data.eos_not_learned | No end-of-sequence token is supervised | Use another pad token, or mask by attention_mask.
data.eos_outside_span | The assistant span ends before its end token | Mend the template: close the turn inside it.
data.marker_not_found | The response marker never occurs as tokenised | Pass token ids cut from a real row.
data.double_bos | Rows start with two BOS tokens | Set add_special_tokens=False for templated text.
data.no_bos | Rows lack the BOS the model expects | Add it once.
data.ids_out_of_range | Token ids outside the embedding | Resize the embeddings or reuse an existing token.
data.wrong_ignore_index | Prompt labels are a real token id | Set prompt labels to -100.
data.packing_leaks | Packed samples see each other | Pass reset position_ids and use_cache=False, or a block mask.
model.no_trainable | Nothing trains | Load the adapter with is_trainable=True, or add one.
model.loss_without_graph | The loss has no graph | Call enable_input_require_grads() or use non-reentrant checkpointing.
model.adapter_no_gradient | The adapter gets no gradient | Call enable_input_require_grads().
model.adapter_frozen | The adapter was loaded frozen | Use is_trainable=True.
model.adapter_not_attached | A target matches no module | Correct target_modules.
model.optimizer_misses | Trainable parameters are not in the optimizer | Build the optimizer after the adapter.
model.extra_trainable | Parameters beside the adapter train and are not saved | Freeze them or list them in modules_to_save.
model.tie_broken | Tied weights are no longer tied | Train one of them and keep the tie.
model.new_rows_not_saved | New token rows are neither trained nor saved | Use trainable_token_indices or save_embedding_layers.
model.new_rows_far | New token rows are far from the old ones | Initialise them to the mean row.
model.embedding_row | An embedding row is zero or NaN | Set it to the mean row.
model.weights_not_moving | A step changes no weight | Keep trained weights in float32 or raise the learning rate.
save.adapter_empty | The saved adapter lacks its tensors | Save again without overriding state_dict.
save.read_back | What was saved does not read back equal | Save again and compare.
resume.optimizer_missing | Optimizer, scheduler or scaler state is not restored | Save and restore all of them.
resume.data_order | Rows are seen twice after resuming | Set the sampler's epoch and skip the batches already seen.
training.accumulation | Accumulation weights micro-batches by number, not by tokens | Divide the summed loss by the tokens of the whole window.
training.effective_batch | The batch shrank and accumulation stayed | Keep batch times accumulation constant.
training.schedule | The schedule advances faster than the optimizer | Step it once per optimizer step.
training.double_scaler | The loss is scaled twice | Leave out the loop's own GradScaler, or set fp16=False.
training.checkpointing_differs | Checkpointing changes the gradients | Use non-reentrant checkpointing.
speed.padding | Most token slots are padding | Pad per batch, group by length or pack.
speed.padding_in_dataset | The data set itself is padded to one length | Remove padding='max_length' from tokenisation.
speed.packing_underfilled | Packed rows are far from full | Give the packer a larger pool.
speed.gc_every_step | The garbage collector runs every step | Take gc.collect() out of the loop.
speed.empty_cache_every_step | empty_cache runs every step | Call it between phases only.
speed.checkpointing_in_eval | Checkpointing recomputes in evaluation | Turn it off for evaluation.
speed.use_cache_off | use_cache is False in the saved config | Set use_cache=True before saving.
speed.data_wait | Steps wait for data | Use loader workers or prepare the data before.
speed.host_bound | The device waits for the host to give it work | Use a larger micro-batch, torch.compile, or a fused optimizer.
speed.sync_every_step | The host waits for the device every step | Read values only when logging.
speed.emulated_bf16 | bfloat16 is emulated on this device | Use float16 or float32.
speed.checkpointing_unneeded | Checkpointing saves memory that is not needed | Turn gradient_checkpointing off, or use a larger micro-batch.
speed.swap | Memory of the run is swapped to disk | Free host memory, or use fewer loader workers.
speed.recompilation | Each shape compiles again | Pad to multiples.
error.other | The run failed | See the message.
"""


def _read(table: str) -> dict[str, Cause]:
    rows = (line.split(" | ") for line in table.strip().splitlines())
    return {identifier: Cause(identifier, title, remedy) for identifier, title, remedy in rows}


CAUSES: dict[str, Cause] = _read(_TABLE)
"""Every cause by its identifier."""
