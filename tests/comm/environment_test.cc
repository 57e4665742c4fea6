#include "comm/environment/environment.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace unisono {
namespace {

using Variables = std::map<std::string, std::string>;

Environment read(const Variables& variables, const InitOptions& options = {}) {
  return read_environment(options, [&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
  });
}

std::string refusal(const Variables& variables, const InitOptions& options = {}) {
  try {
    read(variables, options);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "accepted";
}

void expect_names(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

TEST(Environment, NothingSetIsAWorldOfOne) {
  const auto e = read({});
  EXPECT_EQ(e.source, Environment::Source::none);
  EXPECT_EQ(e.meeting, Environment::Meeting::none);
  EXPECT_EQ(e.rank, 0);
  EXPECT_EQ(e.size, 1);
}

// As Slurm 22.05 sets them.
TEST(Environment, OnlyTasksOfSrunAreSlurmsRanks) {
  const Variables shell{{"SLURM_JOB_ID", "9"}, {"SLURM_NTASKS", "4"}};
  const Variables batch{{"ENVIRONMENT", "BATCH"}, {"SLURM_JOB_ID", "9"}, {"SLURM_NTASKS", "4"},
                        {"SLURM_PROCID", "0"},    {"SLURM_NNODES", "2"}, {"SLURM_JOB_NODELIST", "n[0-1]"}};
  Variables interactive = shell;  // salloc with LaunchParameters=use_interactive_step
  interactive["SLURM_PROCID"] = "0";
  interactive["SLURM_STEP_ID"] = "4294967290";
  interactive["SLURM_STEP_NUM_TASKS"] = "1";
  Variables without_tasks = batch;  // sbatch --nodes=2 and no more
  without_tasks.erase("SLURM_NTASKS");
  for (const auto& variables : {shell, batch, interactive, without_tasks}) {
    const auto e = read(variables);
    EXPECT_EQ(e.source, Environment::Source::none);
    EXPECT_EQ(e.size, 1);
    EXPECT_TRUE(describe(e).starts_with("a world of one: ")) << describe(e);
  }
  expect_names(describe(read(batch)), {"SLURM_PROCID=0", "SLURM_NTASKS=4", "srun"});
  Variables task = batch;  // srun in the batch script
  task["SLURM_STEP_ID"] = "0";
  task["SLURM_STEP_NUM_TASKS"] = "4";
  EXPECT_EQ(read(task).size, 4);
  EXPECT_TRUE(read(task).several_hosts);
}

TEST(Environment, SrunWithPmi2IsSlurm) {
  Variables v{{"PMI_RANK", "1"},
              {"PMI_SIZE", "2"},
              {"SLURM_PROCID", "1"},
              {"SLURM_NTASKS", "2"},
              {"SLURM_STEP_NUM_TASKS", "2"},
              {"SLURM_STEP_ID", "0"},
              {"SLURM_JOB_ID", "9"},
              {"SLURM_NNODES", "2"},
              {"SLURM_STEP_NODELIST", "n[0-1]"}};
  EXPECT_EQ(read(v).source, Environment::Source::slurm);
  EXPECT_EQ(read(v).host, "n0");
  v["PMI_SIZE"] = "4";  // mpiexec under srun, two ranks where srun started one of its own
  v["MPI_LOCALNRANKS"] = "2";
  EXPECT_EQ(read(v).source, Environment::Source::mpich);
  EXPECT_EQ(read(v).size, 4);
}

TEST(Environment, ReadsTorchrun) {
  const auto e = read({{"RANK", "1"},
                       {"WORLD_SIZE", "2"},
                       {"MASTER_ADDR", "127.0.0.1"},
                       {"MASTER_PORT", "29501"},
                       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                       {"TORCHELASTIC_RESTART_COUNT", "3"}});
  EXPECT_EQ(e.meeting, Environment::Meeting::agent_store);
  EXPECT_EQ(e.rank, 1);
  EXPECT_EQ(e.size, 2);
  EXPECT_EQ(e.host, "127.0.0.1");
  EXPECT_EQ(e.port, 29501);
  EXPECT_EQ(e.attempt, 3);
}

TEST(Environment, ReadsVariablesSetByHand) {
  const Variables by_hand{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}};
  EXPECT_EQ(read(by_hand).meeting, Environment::Meeting::tcp);
  auto with_file = by_hand;
  with_file["UNISONO_STORE"] = "file:/tmp/x";
  EXPECT_EQ(read(with_file).meeting, Environment::Meeting::file);
  EXPECT_EQ(read(with_file).path, "/tmp/x");
}

TEST(Environment, ReadsTheOtherLaunchers) {
  auto e = read({{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "3"}, {"PMIX_NAMESPACE", "77"}});
  EXPECT_EQ(e.source, Environment::Source::open_mpi);
  EXPECT_EQ(e.meeting, Environment::Meeting::job_file);
  EXPECT_EQ(e.job, "job-77");
  EXPECT_EQ(e.rank, 2);
  e = read({{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}});
  EXPECT_EQ(e.source, Environment::Source::mpich);
  EXPECT_TRUE(e.job.starts_with("parent-")) << e.job;
  e = read({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "3"}, {"SLURM_JOB_ID", "9"}, {"SLURM_STEP_ID", "4"}});
  EXPECT_EQ(e.source, Environment::Source::slurm);
  EXPECT_EQ(e.job, "slurm-9.4");
  e = read({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "5"}});
  EXPECT_EQ(e.meeting, Environment::Meeting::tcp) << "an address that is told is used";
}

TEST(Environment, EarlierSourcesWin) {
  const Variables both{{"RANK", "0"},        {"WORLD_SIZE", "2"},   {"MASTER_ADDR", "h"},
                       {"MASTER_PORT", "1"}, {"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "4"}};
  EXPECT_EQ(read(both).source, Environment::Source::variables);
  InitOptions given;
  given.rank = 5;
  given.size = 6;
  EXPECT_EQ(read(both, given).source, Environment::Source::arguments);
  EXPECT_EQ(read(both, given).rank, 5);
  InitOptions only_rank;
  only_rank.rank = 1;
  EXPECT_EQ(read(both, only_rank).rank, 1);
  EXPECT_EQ(read(both, only_rank).size, 2);
}

TEST(Environment, RefusalsNameVariablesAndValues) {
  expect_names(refusal({{"RANK", "1"}}), {"RANK=1", "WORLD_SIZE (not set)"});
  expect_names(refusal({{"WORLD_SIZE", "2"}}), {"WORLD_SIZE=2", "RANK (not set)"});
  expect_names(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), {"RANK=2", "WORLD_SIZE=2", "[0, 2)"});
  expect_names(refusal({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), {"RANK=-1"});
  expect_names(refusal({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), {"WORLD_SIZE=0", "at least 1"});
  expect_names(refusal({{"RANK", "one"}, {"WORLD_SIZE", "2"}}), {"RANK='one'", "whole number"});
  expect_names(refusal({{"RANK", "1x"}, {"WORLD_SIZE", "2"}}), {"RANK='1x'"});
  expect_names(refusal({{"RANK", "1"}, {"WORLD_SIZE", "99999999999"}}), {"WORLD_SIZE='99999999999'"});
  expect_names(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), {"RANK=0", "MASTER_ADDR", "UNISONO_STORE"});
  expect_names(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}}),
               {"MASTER_ADDR=h", "MASTER_PORT (not set)"});
  expect_names(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "70000"}}),
               {"MASTER_PORT=70000"});
  expect_names(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"UNISONO_STORE", "/tmp/x"}}),
               {"UNISONO_STORE=/tmp/x", "file:"});
  InitOptions half;
  half.rank = 1;
  expect_names(refusal({}, half), {"rank=1", "size=-1"});
}

TEST(Environment, ContradictionsNameBothSides) {
  Variables v{{"RANK", "0"},        {"WORLD_SIZE", "2"},           {"MASTER_ADDR", "h"},
              {"MASTER_PORT", "1"}, {"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}};
  expect_names(refusal(v), {"RANK=0", "WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4"});
  v["TORCHELASTIC_RUN_ID"] = "none";
  EXPECT_EQ(refusal(v), "accepted") << "torchrun started by mpirun, one per host";
  v.erase("TORCHELASTIC_RUN_ID");
  v["OMPI_COMM_WORLD_RANK"] = "0";
  v["OMPI_COMM_WORLD_SIZE"] = "2";
  EXPECT_EQ(refusal(v), "accepted") << "they agree";
}

TEST(Environment, SeveralHostsWithoutAnAddressMeetByMpi) {
  const Variables open_mpi{
      {"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  const Variables slurm{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_NNODES", "2"}};
  EXPECT_EQ(read(open_mpi).meeting, Environment::Meeting::mpi);
  EXPECT_EQ(read(slurm).meeting, Environment::Meeting::mpi);
  InitOptions shared;
  shared.transport = "shm";
  expect_names(refusal(open_mpi, shared), {"several hosts", "MASTER_ADDR"});
  expect_names(refusal(slurm, shared), {"several hosts"});
  Variables addressed = open_mpi;
  addressed["MASTER_ADDR"] = "h";
  addressed["MASTER_PORT"] = "1";
  EXPECT_EQ(read(addressed).meeting, Environment::Meeting::tcp);
}

TEST(Environment, SlurmsNodeListTellsTheFirstHost) {
  const Variables job{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "4"}, {"SLURM_NNODES", "2"}, {"SLURM_JOB_ID", "1234567"}};
  const std::pair<const char*, const char*> lists[] = {{"node1", "node1"},
                                                       {"node1,node2", "node1"},
                                                       {"gpu[003-005,9],login", "gpu003"},
                                                       {"a[7,9]", "a7"},
                                                       {"b-c[12]", "b-c12"}};
  for (const auto& [list, first] : lists) {
    Variables v = job;
    v["SLURM_STEP_NODELIST"] = list;
    v["SLURM_JOB_NODELIST"] = "other[1-2]";
    const auto e = read(v);
    EXPECT_EQ(e.meeting, Environment::Meeting::tcp);
    EXPECT_EQ(e.host, first);
    EXPECT_EQ(e.port, 10'000 + 1234567 % 20'000);
    EXPECT_TRUE(e.several_hosts);
  }
}

// Arguments that say what the launcher says do not hide its hosts; a host that is split is several.
TEST(Environment, SeveralHosts) {
  const Variables one{{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "4"}, {"UNISONO_STORE", "file:/x"}};
  Variables two = one, split = one;
  two["LOCAL_WORLD_SIZE"] = "2";
  split["UNISONO_HOST_PART"] = "left";
  EXPECT_FALSE(read(one).several_hosts);
  EXPECT_TRUE(read(two).several_hosts);
  EXPECT_TRUE(read(two, {.rank = 1, .size = 4}).several_hosts);
  EXPECT_TRUE(read(two, {.rank = 1}).several_hosts);
  EXPECT_FALSE(read(two, {.rank = 1, .size = 2}).several_hosts) << "other ranks than the launcher's";
  EXPECT_FALSE(read(two, {.rank = 0, .size = 4}).several_hosts);
  EXPECT_TRUE(read(split).several_hosts);
  EXPECT_TRUE(read(split, {.rank = 0, .size = 2}).several_hosts);
  EXPECT_FALSE(read(split, {.transport = "shm"}).several_hosts);
  EXPECT_FALSE(read({{"UNISONO_HOST_PART", "left"}}).several_hosts) << "a world of one";
}

TEST(Environment, StepsOfOneSlurmJobAreApart) {
  std::set<int> ports;
  std::set<std::string> circles;
  for (const char* job : {"9", "10", "4294967295"})
    for (const char* step : {"0", "1", "2"}) {
      const auto e = read({{"SLURM_PROCID", "1"},
                           {"SLURM_NTASKS", "4"},
                           {"SLURM_NNODES", "2"},
                           {"SLURM_JOB_ID", job},
                           {"SLURM_STEP_ID", step},
                           {"SLURM_STEP_NODELIST", "n[0-1]"}});
      EXPECT_GE(e.port, 10'000);
      EXPECT_LT(e.port, 30'000);
      ports.insert(e.port);
      circles.insert(e.circle);
      expect_names(e.circle, {"slurm-" + std::string(job) + "." + step});
    }
  EXPECT_EQ(ports.size(), 9u);
  EXPECT_EQ(circles.size(), 9u);
}

TEST(Environment, WhereSlurmsListDoesNotTellRank0TheAddressIsAskedFor) {
  const std::pair<const char*, const char*> layouts[] = {{"SLURM_DISTRIBUTION", "arbitrary"}, {"SLURM_HET_SIZE", "2"}};
  for (const auto& [name, value] : layouts) {
    Variables v{{"SLURM_PROCID", "1"},
                {"SLURM_NTASKS", "2"},
                {"SLURM_NNODES", "2"},
                {"SLURM_JOB_ID", "9"},
                {"SLURM_STEP_NODELIST", "n[0-1]"}};
    v[name] = value;
    expect_names(refusal(v), {name, value, "MASTER_ADDR", "MASTER_PORT"});
    v["PMIX_RANK"] = "1";
    EXPECT_EQ(read(v).meeting, Environment::Meeting::mpi);
    v["MASTER_ADDR"] = "n1";
    v["MASTER_PORT"] = "1";
    EXPECT_EQ(read(v).meeting, Environment::Meeting::tcp);
  }
}

TEST(Environment, AnotherJobOrSecretMeetsElsewhere) {
  const Variables plain{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"UNISONO_STORE", "file:/x"}};
  EXPECT_EQ(read(plain).circle, "");
  std::set<std::string> circles;
  for (const Variables& more :
       {Variables{{"UNISONO_JOB", "7"}}, Variables{{"UNISONO_JOB", "8"}}, Variables{{"UNISONO_SECRET", "s"}},
        Variables{{"UNISONO_SECRET", "t"}}, Variables{{"UNISONO_JOB", "7"}, {"UNISONO_SECRET", "s"}}}) {
    Variables v = plain;
    v.insert(more.begin(), more.end());
    circles.insert(read(v).circle);
    EXPECT_EQ(read(v).circle.find("s/"), std::string::npos) << "the secret itself is in no key";
  }
  EXPECT_EQ(circles.size(), 5u);
}

TEST(Environment, OneHostDoesNotNeedMpi) {
  EXPECT_EQ(
      read({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}).meeting,
      Environment::Meeting::job_file);
}

TEST(Environment, TheTransportMpiNeedsNothingElse) {
  InitOptions by_name;
  by_name.transport = "mpi";
  EXPECT_EQ(read({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}, by_name).meeting, Environment::Meeting::mpi);
  EXPECT_EQ(read({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}, by_name).rank, 1);
  const auto alone = read({}, by_name);
  EXPECT_EQ(alone.meeting, Environment::Meeting::mpi);
  EXPECT_EQ(alone.size, 1);
  EXPECT_EQ(describe(alone), "rank and size are MPI's to tell");
}

TEST(Environment, DescribesItself) {
  EXPECT_EQ(describe(read({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"UNISONO_STORE", "file:/tmp/s"}})),
            "RANK=1 WORLD_SIZE=2 UNISONO_STORE=file:/tmp/s from the environment, rendezvous in that file");
  EXPECT_TRUE(describe(read({})).starts_with("a world of one"));
}

}  // namespace
}  // namespace unisono
