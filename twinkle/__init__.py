"""Twinkle for script writers: `initialize`, meshes and groups, and the markers for components of your own.

The rest stands in `twinkle.dataset`, `.dataloader`, `.data_format`, `.template`, `.preprocessor`, `.processor`, `.model`, `.loss`,
`.metric`, `.sampler`, `.advantage`, `.reward`, `.hub` and `.testing`. Importing any of them loads neither torch nor transformers.
"""

from twinkle_core import __version__ as __version__
from twinkle_core.api import get_device_placement as get_device_placement
from twinkle_core.api import initialize as initialize
from twinkle_core.api import shutdown as shutdown
from twinkle_core.mesh import DeviceGroup as DeviceGroup
from twinkle_core.mesh import DeviceMesh as DeviceMesh
from twinkle_core.remote import remote_class as remote_class
from twinkle_core.remote import remote_function as remote_function
