#pragma once

#include <string>

namespace unisono {

/// A directory under the temporary directory that only this user can read or write, for one job's rendezvous file; made
/// when absent. What jobs killed at their start left there more than a day ago is removed in passing.
/// *Throws* `invalid_argument` when somebody else owns that name or others may write there.
std::string private_job_directory(const std::string& job);

}  // namespace unisono
