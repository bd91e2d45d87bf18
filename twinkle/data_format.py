"""The records that travel between components."""

from twinkle_core.data_format import InputFeature as InputFeature
from twinkle_core.data_format import Message as Message
from twinkle_core.data_format import ModelOutput as ModelOutput
from twinkle_core.data_format import SampledSequence as SampledSequence
from twinkle_core.data_format import SampleResponse as SampleResponse
from twinkle_core.data_format import SamplingParams as SamplingParams
from twinkle_core.data_format import ToolCall as ToolCall
from twinkle_core.data_format import Trajectory as Trajectory
