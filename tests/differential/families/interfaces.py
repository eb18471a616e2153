"""`max.interfaces` and contexts: sampling parameters, requests, statuses, outputs, the indices of a context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from max import interfaces
from tests.differential.families._plain import plain_family

SAMPLING = (
    "top_k", "top_p", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "max_new_tokens", "min_new_tokens", "ignore_eos", "stop", "stop_token_ids", "detokenize",
)  # fmt: skip
CONTEXT = (
    "start_idx", "active_idx", "end_idx", "current_length", "active_length", "prompt_tokens", "generated_tokens",
    "all_tokens", "next_tokens", "is_done", "is_initial_prompt", "needs_ce", "status", "max_length", "min_tokens",
    "log_probabilities", "ignore_eos",
)  # fmt: skip


def namespace() -> Mapping[str, Any]:
    from max.pipelines.core import TextContext

    def context(n: int = 5, **more: Any) -> TextContext:
        return TextContext(**{"max_length": 50, "tokens": np.arange(n, dtype=np.int64), **more})

    def request(**more: Any) -> Any:
        given = {"request_id": interfaces.RequestID("r"), "model_name": "m"}
        return interfaces.TextGenerationRequest(**{**given, **more})

    def values(of: Any, *names: str) -> list[Any]:
        return [(n, getattr(of, n)) for n in names if hasattr(of, n)]

    return {
        **{n: getattr(interfaces, n) for n in dir(interfaces) if n[0].isupper()},
        "np": np, "TextContext": TextContext, "ctx": context, "req": request,
        "at": lambda of, *names: [getattr(of, n) for n in names],
        "sp": lambda params: values(params, *SAMPLING),
        "ct": lambda made: values(made, *CONTEXT),
    }  # fmt: skip


PROGRAMS = r"""
sp(SamplingParams())
sp(SamplingParams(top_k=1))
sp(SamplingParams(top_k=-1))
SamplingParams(top_k=0)
SamplingParams(top_k=-2)
SamplingParams(top_k=256)
SamplingParams(top_k=257)
SamplingParams(top_k=1.5)
SamplingParams(top_p=0)
SamplingParams(top_p=1.5)
SamplingParams(top_p=-0.5)
SamplingParams(min_p=-1)
SamplingParams(min_p=2)
SamplingParams(temperature=-1)
sp(SamplingParams(temperature=0))
SamplingParams(temperature="a")
SamplingParams(repetition_penalty=0)
SamplingParams(repetition_penalty=-1)
SamplingParams(frequency_penalty=-3)
SamplingParams(presence_penalty=3)
SamplingParams(max_new_tokens=0)
SamplingParams(max_new_tokens=-1)
SamplingParams(min_new_tokens=-1)
SamplingParams(min_new_tokens=5,max_new_tokens=3)
SamplingParams(stop="a").stop
SamplingParams(stop=["a"]).stop
SamplingParams(stop_token_ids=[1]).stop_token_ids
SamplingParams(seed=3).seed
SamplingParams(seed=None).seed
SamplingParams(seed=-1).seed
SamplingParams(foo=1)
SamplingParams(1)
p=SamplingParams(); p.top_k=7; p.top_k
p=SamplingParams(); p.foo=7
SamplingParams(seed=1)==SamplingParams(seed=1)
SamplingParams.from_input(SamplingParamsInput()).top_k
sp(SamplingParams.from_input_and_generation_config(SamplingParamsInput(),sampling_params_defaults=SamplingParamsGenerationConfigDefaults()))
sp(SamplingParams.from_input_and_generation_config(SamplingParamsInput(temperature=0.5),sampling_params_defaults=SamplingParamsGenerationConfigDefaults(temperature=0.7,top_k=40)))
sp(SamplingParams.from_input_and_generation_config(SamplingParamsInput(top_k=3),sampling_params_defaults=SamplingParamsGenerationConfigDefaults(temperature=0.7,top_k=40,do_sample=False)))
SamplingParamsGenerationConfigDefaults().values_to_update
SamplingParamsGenerationConfigDefaults(temperature=0.5,max_new_tokens=3).values_to_update
SamplingParamsGenerationConfigDefaults(do_sample=False).values_to_update
at(SamplingParamsInput(),"top_k","top_p","temperature","seed","stop")
req().request_id
at(req(),"prompt","messages","images","tools","response_format","timestamp_ns","request_path","logprobs","echo","stop","chat_template_options","target_endpoint","number_of_images")
req(prompt="a",messages=[TextGenerationRequestMessage(role="user",content="hi")])
req(prompt="a").prompt
req(prompt=[1,2]).prompt
req(prompt="a").messages
req(messages=[TextGenerationRequestMessage(role="user",content="hi")]).messages[0].content
req(messages=[{"role":"user","content":"hi"}]).messages[0]["role"]
TextGenerationRequestMessage(role="foo",content="hi")
TextGenerationRequestMessage(role="user",content=3)
TextGenerationRequestMessage(role="user",content=[{"type":"image"}])
TextGenerationRequestMessage(role="user",content=[{"type":"image"}])["content"]
TextGenerationRequestMessage(role="user",content=[{"type":"text"}])
TextGenerationRequestMessage(role="user",content=[{"type":"text","text":"a"}])
TextGenerationRequestMessage(role="user",content=[{"type":"foo"}])
TextGenerationRequest("r","m")
TextGenerationRequest(model_name="m")
RequestID("a")
RequestID("a").value
str(RequestID("a"))
RequestID("a")=="a"
repr(RequestID("a"))
isinstance(RequestID("a"),str)
f"{RequestID('a')}"
GenerationStatus("active")
GenerationStatus.ACTIVE.is_done
GenerationStatus.END_OF_SEQUENCE.is_done
[m.value for m in GenerationStatus]
str(GenerationStatus.ACTIVE)
GenerationStatus.ACTIVE=="active"
PipelineTask("text_generation")
[m.value for m in PipelineTask]
str(PipelineTask.TEXT_GENERATION)
PipelineTask("foo")
BatchType.CE
[m.value for m in BatchType]
str(BatchType.CE)
BatchType.CE=="CE"
TextGenerationOutput(request_id=RequestID("a"),tokens=[1],final_status=GenerationStatus.ACTIVE).is_done
TextGenerationOutput(request_id=RequestID("a"),tokens=[1],final_status=GenerationStatus.END_OF_SEQUENCE).is_done
TextGenerationOutput(request_id=RequestID("a"),tokens=[1],final_status=GenerationStatus.END_OF_SEQUENCE).log_probabilities
TextGenerationOutput(RequestID("a"),[1],GenerationStatus.ACTIVE)
TextGenerationOutput()
TextGenerationOutput(request_id=RequestID("a"),tokens=[1],final_status=GenerationStatus.ACTIVE)==TextGenerationOutput(request_id=RequestID("a"),tokens=[1],final_status=GenerationStatus.ACTIVE)
at(LogProbabilities([0.5],[{1:0.5}]),"token_log_probabilities","top_log_probabilities")
LogProbabilities([0.5],[{1:0.5}])==LogProbabilities([0.5],[{1:0.5}])
LogProbabilities()
at(SchedulerResult.cancelled(),"is_done","result")
at(SchedulerResult.create(3),"is_done","result")
at(AudioGenerationMetadata(),"sample_rate","duration","echo")
AudioGenerationMetadata(sample_rate=3).to_dict()
AudioGenerationMetadata(sample_rate=3)==AudioGenerationMetadata(sample_rate=3)
[m.value for m in LoRAOperation]
[m.value for m in LoRAStatus]
[m.value for m in LoRAType]
LoRAOperation.LOAD=="load"
str(LoRAStatus.SUCCESS)
LoRARequest(operation=LoRAOperation.LOAD,lora_name="a",lora_path="p").lora_path
LoRARequest(operation=LoRAOperation.LOAD)
LoRAResponse(status=LoRAStatus.SUCCESS,message="a").message
at(TextGenerationInputs(batches=[{}],num_steps=1),"num_steps","batch_type","enable_log_probs")
ct(ctx())
ct(ctx(1))
TextContext(max_length=50)
TextContext(tokens=np.arange(3))
TextContext(max_length=2,tokens=np.arange(5))
TextContext(max_length=50,tokens=np.array([],np.int64))
TextContext(max_length=50,tokens=np.zeros((2,2),np.int64))
TextContext(max_length=50,tokens=[1,2,3])
ctx(tokens=np.arange(3,dtype=np.int32)).tokens.dtype
ctx().tokens.shape
c=ctx(); c.update(9); ct(c)
c=ctx(); c.update(9); c.update(10); c.all_tokens
c=ctx(); c.update(9); c.generated_tokens
c=ctx(eos_token_ids={9}); c.update(9); at(c,"status","is_done")
c=ctx(eos_token_ids={9}); c.update(8); at(c,"status","is_done")
c=ctx(max_length=6); c.update(9); at(c,"status","is_done","current_length")
c=ctx(max_length=5); c.update(9); at(c,"status","is_done")
c=ctx(); c.bump_token_indices(start_idx=2); ct(c)
c=ctx(); c.bump_token_indices(start_idx=20)
c=ctx(); c.bump_token_indices(active_idx=-1); ct(c)
c=ctx(); c.set_token_indices(start_idx=2,active_idx=4,end_idx=5); ct(c)
c=ctx(); c.set_token_indices(start_idx=6)
c=ctx(); c.set_token_indices(start_idx=-1)
c=ctx(); c.reset(); ct(c)
c=ctx(); c.update(9); c.reset(); ct(c)
c=ctx(); c.compute_num_available_steps(50)
c=ctx(); c.compute_num_available_steps(3)
c=ctx(); c.update(9); c.jump_ahead(10); ct(c)
c=ctx(); c.jump_ahead(10); ct(c)
c=ctx(); c.rollback(1)
c=ctx(); c.update(8); c.update(9); c.rollback(1); ct(c)
c=ctx(); c.skip_processing(2); ct(c)
c=ctx(); c.skip_processing(9)
c=ctx(); c.maybe_chunk(3); ct(c)
c=ctx(); c.get_min_token_logit_mask(2)
c=ctx(sampling_params=SamplingParams(min_new_tokens=2),eos_token_ids={7}); c.get_min_token_logit_mask(1)
c=ctx(); c.to_generation_output().tokens
c=ctx(); c.update(9); at(c.to_generation_output(),"tokens","final_status")
c=ctx(); c.update(9); c.to_generation_output(); c.to_generation_output().tokens
c=ctx(); c.is_done
c=ctx(); c.status=GenerationStatus.CANCELLED; c.is_done
c=ctx(); c.max_length=3; c.max_length
c=ctx(); c.json_schema
c=ctx(); c.eos_token_ids
c=ctx(); c.sampling_params.top_k
c=ctx(); c==c
c=ctx(); c.draft_offset
c=ctx(); c.set_draft_offset(1); c.draft_offset
c=ctx(); c.get_last_generated_token()
c=ctx(); c.update(9); c.last_generated_token
c=ctx(); c.set_matcher(None); c.matcher
p = SamplingParams(); p.temperature = 0.5; p.temperature
sp(SamplingParams(temperature=0, top_k=40))
"""

FAMILY = plain_family(PROGRAMS, namespace)
