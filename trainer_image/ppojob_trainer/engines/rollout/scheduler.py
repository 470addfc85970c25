"""A scheduler for vLLM's engine that hands over whole responses, and schedules steps of pure decoding in short loops.

vLLM's scheduler treats every sequence alike in every step: it may be a new one, a part of a prompt, an image, a draft
to verify. With a few hundred sequences and a small model, this takes longer than the GPU needs for the step. And each
token becomes a message to the engine's owner, which here waits for the whole response. So

* responses are kept until they are complete, and then sent as one message (`Response`); strings that end one are found
  here and not in its text (`stop_strings`);
* a step in which each running sequence gets one more token is scheduled by `_schedule_decoding`, and its tokens are
  recorded by `_record`. All other steps are vLLM's own, also those that check drafts. When few sequences are left,
  `DraftingChoice` says whether the steps have drafts (`rollout.speculative`);
* the weights may change while requests are unfinished (`weight_changes`).

vLLM loads it by the argument `scheduler_cls`. vLLM's scheduler interface may change with each version, so
`vllm_arguments` names the version that the tests compare it with; other versions run vLLM's scheduler. It refuses
nothing: whatever it does not know, it leaves to vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from ppojob_trainer.engines.rollout.drafting import DraftingChoice
from ppojob_trainer.engines.rollout.options import RECORDS_EXPERTS
from ppojob_trainer.engines.rollout.response import Response, columns_of, end_by_string, ends
from ppojob_trainer.engines.rollout.stage_groups import admitting_a_share
from ppojob_trainer.engines.rollout.stop_strings import STOP_STRINGS, StopStrings, token_texts
from ppojob_trainer.engines.rollout.weight_changes import forget_blocks

_NEVER: Final[frozenset[int]] = frozenset()


@dataclass(slots=True)
class _Decoding:
    """The requests of a step that `_schedule_decoding` scheduled. preemptions: how many there were until then."""

    responses: list[Response]
    preemptions: int


class ResponseScheduler(AsyncScheduler):
    """See the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Stages on the CPU compute several steps at once, but none of a sequence whose last token is unknown.
        is_synchronous = self.use_pp and not self.scheduler_config.async_scheduling
        self._scheduler: type[Scheduler] = Scheduler if is_synchronous else AsyncScheduler
        self._responses: dict[str, Response] = {}
        self._ended: dict[str, Response] = {}
        self._decoding: dict[int, _Decoding] = {}
        self._num_preemptions = 0
        self._num_unusual = 0
        self._texts: list[bytes] = []
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        settings = self.vllm_config.additional_config
        if isinstance(settings, dict) and settings.get(RECORDS_EXPERTS):
            self.aux_output_connector = AuxOutputSchedulerConnector()
        self._is_plain = self._has_plain_model()
        self._drafts_of_size, self._no_drafts = self.dynamic_sd_lookup, [0] * (self.max_num_running_reqs + 1)
        # vLLM's arguments allow drafts up to a number of sequences; see `options`.
        most = None if self._drafts_of_size is None else sum(1 for number in self._drafts_of_size[1:] if number)
        self._drafting = None if most is None else DraftingChoice(most)
        self._has_drafts: dict[int, bool] = {}

    def _has_plain_model(self) -> bool:
        """Whether a decoding step of this engine needs one token and at most one block for each request."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        unusual = (
            *(self.connector, self.ec_connector, self.aux_output_connector, self.lora_config, self.perf_metrics),
            *(self.num_spec_tokens and self.dynamic_sd_lookup is None, self.num_lookahead_tokens),
            self.num_prefill_lookahead,
            *(self.use_pp, self.defer_block_free, self.needs_kv_cache_zeroing, self.has_mamba_layers),
            *(self.is_encoder_decoder, self.return_sampling_mask, self.enable_kv_cache_events, self.log_stats),
            *(self.dcp_world_size > 1, self.pcp_world_size > 1, self.num_sampled_tokens_per_step != 1),
        )
        return not any(unusual) and len(managers) == 1 and type(managers[0]) is FullAttentionManager

    def add_request(self, request: Request) -> None:
        """See vLLM."""
        super().add_request(request)
        sampling = request.sampling_params
        if sampling is None or request.request_id in self._responses:
            return
        is_whole = (
            sampling.output_kind is RequestOutputKind.FINAL_ONLY
            and not sampling.stop
            and sampling.num_logprobs in (None, 0)
            and sampling.prompt_logprobs is None
            and not request.resumable
            and not self.return_sampling_mask
        )
        is_plain = is_whole and not (
            request.use_structured_output
            or request.has_encoder_inputs
            or sampling.repetition_detection is not None
            or sampling.min_tokens
        )
        self._num_unusual += not is_plain
        self._responses[request.request_id] = Response(
            request,
            min(self.max_model_len, request.num_prompt_tokens + request.max_tokens),
            is_whole,
            is_plain,
            sampling.eos_token_id,
            frozenset(sampling.stop_token_ids or _NEVER),
            sampling.num_logprobs is not None,
            self._strings_of(sampling.extra_args or {}),
        )

    def _strings_of(self, extra_args: dict[str, Any]) -> StopStrings | None:
        """Return the stop strings that a request wants this scheduler to look for."""
        stops = tuple(extra_args.get(STOP_STRINGS, ()))
        if stops and stops not in self._stop_strings:
            self._texts = self._texts or token_texts(cached_tokenizer_from_config(self.vllm_config.model_config))
            self._stop_strings[stops] = StopStrings(stops, self._texts)
        return self._stop_strings.get(stops)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """See vLLM."""
        if self._drafting is None:
            return self._schedule(throttle_prefills)
        wanted = self._drafting.wants_drafts(len(self.running) + len(self.waiting))
        # vLLM reads how many tokens it drafts for a step of so many sequences.
        self.dynamic_sd_lookup = self._drafts_of_size if wanted else self._no_drafts
        output = self._schedule(throttle_prefills, may_decode=not wanted)
        self._has_drafts[id(output)] = wanted
        return output

    def _schedule(self, throttle_prefills: bool, *, may_decode: bool = True) -> SchedulerOutput:
        if may_decode and self._may_only_decode():
            output = self._schedule_decoding()
            if output is not None:
                return output
        with admitting_a_share(self):
            return super().schedule(throttle_prefills)

    def _may_only_decode(self) -> bool:
        return (
            self._is_plain
            and not self._num_unusual
            and not self.waiting
            and not self.kv_holding_waiting
            and not self.deferred_waiting
            and not self._inflight_prefills
            and not self.reset_preempted_req_ids
            and self._pause_state is PauseState.UNPAUSED
            and 0 < len(self.running) <= self.max_num_scheduled_tokens
        )

    def _schedule_decoding(self) -> SchedulerOutput | None:
        """Schedule one token for each running request; None, and nothing has changed: vLLM must schedule the step."""
        responses, growing = [], []
        blocks = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        size, last = self.block_size, self.max_model_len - 1
        is_known = None if self.use_v2_model_runner else self.prev_step_scheduled_req_ids
        for request in self.running:
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            response = self._responses[request.request_id]
            if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
                # The steps that are on their way complete it.
                continue
            if computed >= last:
                continue
            is_decoding = len(request._all_token_ids) + placeholders == computed + 1
            if not is_decoding or request.is_prefill_chunk or request.num_stale_output_tokens or request.spec_token_ids:
                return None
            if is_known is not None and request.request_id not in is_known:
                return None
            responses.append(response)
            if len(blocks[request.request_id]) * size <= computed:
                growing.append(request)
        if not responses or len(growing) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        new_blocks = {}
        for request in growing:
            allocated = self.kv_cache_manager.allocate_slots(request, 1)
            assert allocated is not None, "there were enough free blocks"
            new_blocks[request.request_id] = allocated.get_block_ids(allow_none=True)
        return self._step_of(responses, new_blocks)

    def _step_of(self, responses: list[Response], new_blocks: dict[str, Any]) -> SchedulerOutput:
        """Return vLLM's description of the step, and count its tokens."""
        requests = [response.request for response in responses]
        names = [request.request_id for request in requests]
        cached = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[new_blocks.get(name) for name in names],
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            num_output_tokens=[
                len(request._output_token_ids) + request.num_output_placeholders for request in requests
            ],
        )
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            num_spec_tokens_to_schedule=0,
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
        )
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.clear()
            self.prev_step_scheduled_req_ids.update(names)
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        self._decoding[id(output)] = _Decoding(responses, self._num_preemptions)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See vLLM. Outputs are complete responses only, except those of requests that are not `is_whole`."""
        self._observe(scheduler_output, model_runner_output)
        decoding = self._decoding.pop(id(scheduler_output), None)
        if decoding is not None and self._can_record(decoding, model_runner_output):
            return self._record(decoding.responses, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for of_client in outputs.values():
            of_client.outputs = [output for output in of_client.outputs if self._is_sent(output)]
        self._ended.clear()
        return {
            client: found
            for client, found in outputs.items()
            if found.outputs or found.finished_requests or found.scheduler_stats is not None
        }

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """See vLLM; it looks for no strings."""
        response = self._responses.get(request.request_id)
        string = None if response is None else end_by_string(response, new_token_ids)
        number = len(new_token_ids)
        tokens, is_complete = self._scheduler._update_request_with_output(self, request, new_token_ids, is_stale)
        if string is None or len(tokens) < number or request.status is RequestStatus.FINISHED_STOPPED:
            return tokens, is_complete
        request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, string
        return tokens, True

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """See vLLM."""
        self._scheduler._update_after_schedule(self, scheduler_output)

    def _observe(self, step: SchedulerOutput, found: ModelRunnerOutput) -> None:
        """Let the time of a step decide about drafts."""
        if self._drafting is None:
            return
        has_drafts = self._has_drafts.pop(id(step), False)
        num_sequences = len(step.num_scheduled_tokens)
        has_prompts = step.total_num_scheduled_tokens > num_sequences * (1 + self.num_spec_tokens)
        if step.scheduled_new_reqs or has_prompts or not found.sampled_token_ids:
            self._drafting.interrupt()
            return
        self._drafting.observe(num_sequences, sum(map(len, found.sampled_token_ids)), has_drafts=has_drafts)

    def _is_sent(self, output: EngineCoreOutput) -> bool:
        """Keep what the output adds to a response; if that is complete now, put all of it into the output."""
        name = output.request_id
        response = self._responses.get(name) or self._ended.get(name)
        if response is not None and output.finish_reason is not None:
            output.kv_transfer_params = response.record_of_updates(output.kv_transfer_params)
        if response is None or not response.is_whole:
            return True
        if output.new_logprobs is not None:
            response.log_probs.extend(output.new_logprobs.logprobs[:, 0].tolist())
            response.ranks.extend(output.new_logprobs.sampled_token_ranks.tolist())
        if output.prefill_stats is not None:
            response.prefill = output.prefill_stats
        if output.routed_experts is not None:
            # vLLM's array is a part of the whole step's, whose pinned memory it would keep.
            response.experts.append(output.routed_experts.copy())
        if output.finish_reason is None:
            return False
        if response.experts:
            output.routed_experts = np.concatenate(response.experts)
        output.prefill_stats = response.prefill
        output.new_token_ids = list(response.request.output_token_ids)
        output.new_logprobs = response.log_prob_lists()
        return True

    def _can_record(self, decoding: _Decoding, found: ModelRunnerOutput) -> bool:
        return (
            decoding.preemptions == self._num_preemptions
            and not found.prompt_logprobs_dict
            and not found.num_nans_in_logits
            and not self.grammar_compile_error_reqs
            and not self.encoder_cache_mismatch_reqs
            and (found.logprobs is None or found.logprobs.cu_num_generated_tokens is None)
        )

    def _record(self, responses: list[Response], found: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Append one token to each response; return those that are complete."""
        outputs: dict[int, EngineCoreOutputs] = {}
        tokens, index = found.sampled_token_ids, found.req_id_to_index
        log_probs, ranks = columns_of(found.logprobs)
        ended = set()
        for response in responses:
            request = response.request
            request.num_in_flight_tokens -= 1
            if request.status is not RequestStatus.RUNNING:
                # It was complete one step earlier, or was aborted.
                continue
            row = index[request.request_id]
            if response.has_log_probs:
                response.log_probs.append(log_probs[row])
                response.ranks.append(ranks[row])
            if self._append(response, tokens[row][0]):
                ended.add(request)
                of_client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
                of_client.outputs.append(self._complete(response))
        if ended:
            self.running = [request for request in self.running if request not in ended]
        if self.finished_req_ids_dict:
            for client, names in self.finished_req_ids_dict.items():
                outputs.setdefault(client, EngineCoreOutputs(outputs=[])).finished_requests = names
            self.finished_req_ids_dict.clear()
        self._ended.clear()
        return outputs

    def _append(self, response: Response, token: int) -> bool:
        """Append a token, as vLLM's `_update_request_with_output` does; return whether the response is complete."""
        request = response.request
        all_tokens = request._all_token_ids
        request._output_token_ids.append(token)
        all_tokens.append(token)
        request.num_output_placeholders -= 1
        num_tokens = len(all_tokens)
        if num_tokens % self.hash_block_size == 0:
            request.update_block_hashes()
        is_complete = ends(response, token, num_tokens)
        num_known = request.num_computed_tokens - request.num_output_placeholders
        if num_known % self.block_size == 0:
            self.kv_cache_manager.cache_blocks(request, num_known)
        return is_complete

    def _complete(self, response: Response) -> EngineCoreOutput:
        request = response.request
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=list(request.output_token_ids),
            finish_reason=request.get_finished_reason(),
            new_logprobs=response.log_prob_lists(),
            stop_reason=request.stop_reason,
            events=request.take_events(),
            prefill_stats=response.prefill,
            spec_decode_metrics=request.spec_decode_metrics,
            kv_transfer_params=response.record_of_updates(),
            trace_headers=request.trace_headers,
        )
        self._free_request(request)
        return output

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See vLLM; the owner calls it when the weights have changed. Unfinished requests keep their own cache."""
        for response in self._responses.values():
            response.tokens_at_updates.append(len(response.request.output_token_ids))
        if reset_running_requests or not self.running:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        forget_blocks(self.kv_cache_manager, [request.request_id for request in self.running])
        return self.reset_connector_cache() if reset_connector else True

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self._num_preemptions += 1
        super()._preempt_request(*args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        response = self._responses.pop(request.request_id, None)
        if response is not None:
            self._num_unusual -= not response.is_plain
            self._ended[request.request_id] = response
        return super()._free_request(request, *args, **kwargs)
