#pragma once

// Half a minute per translation unit without this being precompiled.
#include <torch/torch.h>
