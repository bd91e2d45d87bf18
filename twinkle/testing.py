"""Contract suites for plugin authors: subclass one in a test file and give it a fixture."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_core.testing.hubs import HubContract as HubContract
    from twinkle_core.testing.models import TrainableModelContract as TrainableModelContract
    from twinkle_core.testing.samplers import SamplerContract as SamplerContract
    from twinkle_core.testing.templates import TemplateContract as TemplateContract
else:
    from twinkle_core.testing import __dir__, __getattr__  # noqa: F401
