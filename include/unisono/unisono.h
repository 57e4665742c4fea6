#pragma once

/// The whole public API.
#include <unisono/companion.h>
#include <unisono/distributed_data_parallel.h>
#include <unisono/hosts.h>
#include <unisono/init.h>
#include <unisono/make_group.h>
#include <unisono/parameter_averager.h>
#include <unisono/process_group.h>
#include <unisono/regroup.h>
#include <unisono/round_robin.h>
#include <unisono/stats.h>
#include <unisono/sync_batch_norm.h>
#include <unisono/transforms.h>
