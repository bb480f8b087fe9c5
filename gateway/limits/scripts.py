"""What the store runs, in Lua: the decisions of ``rules`` again, where several gateways count together.

A script runs whole or not at all, and by the store's own clock, so that the clocks of gateways do not matter. A holder has a
hash of the numbers of a meter and, for what is in flight, a sorted set of leases by when they end. Both go away by
themselves when they mean nothing any more. A lease that is not renewed ends, so the places of a gateway that died come back.

What a request has reserved is written down in a hash of its worker's when it is taken, and crossed out when it is settled. Only what is
found there is settled: so a settlement may be told twice, or of a request of which nobody knows whether it was let in. What comes
so late that nobody waits for it any more takes nothing.
"""

from __future__ import annotations

from hashlib import sha1

_COMMON = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local FIELDS = {'r', 't', 'rb', 'tb', 'd', 'dt', 'dc', 'od', 'odt', 'odc', 'm', 'mt', 'mc', 'om', 'omt', 'omc'}
local function read(key)
  local found, meter = redis.call('HMGET', key, unpack(FIELDS)), {}
  for i, name in ipairs(FIELDS) do meter[name] = tonumber(found[i] or 0) end
  return meter
end
local function write(key, meter, seconds)
  local values = {}
  for i, name in ipairs(FIELDS) do
    if i <= 4 or (i <= 10 and meter.d ~= 0) or (i > 10 and meter.m ~= 0) then
      values[#values + 1] = name
      values[#values + 1] = string.format('%.17g', meter[name])
    end
  end
  redis.call('HSET', key, unpack(values))
  redis.call('EXPIRE', key, seconds)
end
local function keep(meter)
  if meter.m ~= 0 then return 70 * 86400 end
  if meter.d ~= 0 then return 3 * 86400 end
  return math.ceil(math.max(meter.r - now, meter.t - now, 0)) + 120
end
local function take(meter, bucket, seconds)
  if seconds > 0 then meter[bucket] = math.max(meter[bucket], now) + seconds end
end
local function add(meter, period, tokens, cost, p, other)
  local at = ''
  if meter[p] ~= period then
    if meter['o' .. p] ~= period then return end
    at = 'o'
  end
  meter[at .. p .. 't'] = math.max(meter[at .. p .. 't'] + tokens, 0)
  meter[at .. p .. 'c'] = math.max(meter[at .. p .. 'c'] + cost, 0)
end
"""

CALENDAR = """
-- Months since the year 0, of days since the epoch, and back; the years that are reckoned with here begin in March.
local function month_of(day)
  local shifted = day + 719468
  local era = math.floor(shifted / 146097)
  local rest = shifted - era * 146097
  local year = math.floor((rest - math.floor(rest / 1460) + math.floor(rest / 36524) - math.floor(rest / 146096)) / 365)
  rest = rest - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  return (year + era * 400) * 12 + math.floor((5 * rest + 2) / 153) + 2
end
local function first_day_of(month)
  local year, since_march = math.floor((month - 2) / 12), (month - 2) % 12
  local era = math.floor(year / 400)
  local of_era = year - era * 400
  local days = era * 146097 + of_era * 365 + math.floor(of_era / 4) - math.floor(of_era / 100)
  return days + math.floor((153 * since_march + 2) / 5) - 719468
end
"""

ADMIT = (
    _COMMON
    + CALENDAR
    + """
-- KEYS: of each holder its meter and its leases, and last what the worker has reserved. ARGV: the request's id, the seconds of
-- a lease, the second after which it is too late, then of each holder its limits (requests, tokens per minute, tokens a day, a
-- month, cost a day, a month, at once; 0 for none) and what is asked (requests, slots, tokens, cost).
local id, lease = ARGV[1], tonumber(ARGV[2])
if now > tonumber(ARGV[3]) then return {-1, 0, 0, math.floor(now * 1000000)} end
local day = math.floor(now / 86400)
local month = month_of(day)
local left_of_day = (day + 1) * 86400 - now
local left_of_month = first_day_of(month + 1) * 86400 - now

local function turn(meter, p, period)
  if meter[p] == period then return end
  local o = 'o' .. p
  local found = meter[o] == period and {period, meter[o .. 't'], meter[o .. 'c']} or {period, 0, 0}
  if meter[o] == period or meter[p] > meter[o] then
    meter[o], meter[o .. 't'], meter[o .. 'c'] = meter[p], meter[p .. 't'], meter[p .. 'c']
  end
  meter[p], meter[p .. 't'], meter[p .. 'c'] = found[1], found[2], found[3]
end

local worst, who, why, left = -1, 0, 0, 0
local function refuse(holder, reason, wait, still)
  if wait > worst then worst, who, why, left = wait, holder, reason, still end
end
local function bucket(holder, reason, full, limit, amount)
  if limit > 0 and amount > 0 then
    local wait = full - now - 60 * (1 - math.min(amount / limit, 1))
    if wait > 0.000001 then refuse(holder, reason, wait, limit * (1 - (full - now) / 60)) end
  end
end
local function quota(holder, reason, used, limit, amount, wait)
  if limit > 0 and amount > 0 and used + math.min(amount, limit) > limit then refuse(holder, reason, wait, limit - used) end
end

local holders = (#KEYS - 1) / 2
local meters, wanted = {}, {}
for i = 1, holders do
  local a = {}
  for j = 1, 11 do a[j] = tonumber(ARGV[3 + (i - 1) * 11 + j]) end
  local meter = read(KEYS[2 * i - 1])
  meters[i], wanted[i] = meter, a
  if a[3] > 0 or a[5] > 0 then turn(meter, 'd', day) end
  if a[4] > 0 or a[6] > 0 then turn(meter, 'm', month) end
  if a[7] > 0 and a[9] > 0 then
    redis.call('ZREMRANGEBYSCORE', KEYS[2 * i], '-inf', now)
    if redis.call('ZCARD', KEYS[2 * i]) + a[9] > a[7] then refuse(i, 7, 1e12, 0) end
  end
  bucket(i, 1, meter.r, a[1], a[8])
  bucket(i, 2, meter.t, a[2], a[10])
  quota(i, 3, meter.dt, a[3], a[10], left_of_day)
  quota(i, 4, meter.mt, a[4], a[10], left_of_month)
  quota(i, 5, meter.dc, a[5], a[11], left_of_day)
  quota(i, 6, meter.mc, a[6], a[11], left_of_month)
end
if who == 0 then
  local reserved = {}
  for i = 1, holders do
    local a, meter = wanted[i], meters[i]
    if a[1] > 0 then take(meter, 'r', 60 * a[8] / a[1]) end
    if a[2] > 0 then take(meter, 't', 60 * math.min(a[10] / a[2], 1)) end
    if a[3] > 0 then meter.dt = meter.dt + math.min(a[10], a[3]) end
    if a[4] > 0 then meter.mt = meter.mt + math.min(a[10], a[4]) end
    if a[5] > 0 then meter.dc = meter.dc + math.min(a[11], a[5]) end
    if a[6] > 0 then meter.mc = meter.mc + math.min(a[11], a[6]) end
    write(KEYS[2 * i - 1], meter, keep(meter))
    reserved[2 * i - 1] = id .. ' ' .. KEYS[2 * i - 1]
    reserved[2 * i] = string.format('%d %d %.17g %.17g %.17g', day, month, now, meter.r + meter.rb, meter.t + meter.tb)
    if a[7] > 0 and a[9] > 0 then
      redis.call('ZADD', KEYS[2 * i], now + lease, id)
      redis.call('EXPIRE', KEYS[2 * i], math.ceil(lease) + 1)
    end
  end
  redis.call('HSET', KEYS[#KEYS], unpack(reserved))
  redis.call('EXPIRE', KEYS[#KEYS], 3 * 86400)
end
local reply = {who, why, math.ceil(worst * 1000), math.floor(now * 1000000), math.floor(left * 1000000)}
for i = 1, holders do
  local meter = meters[i]
  reply[#reply + 1] = math.ceil(math.max(meter.r - now, 0) * 1000)
  reply[#reply + 1] = math.ceil(math.max(meter.t - now, 0) * 1000)
end
return reply
"""
)

SETTLE = (
    _COMMON
    + """
-- KEYS as before. ARGV: the request's id, then of each holder what is added: seconds to the buckets of requests and of tokens,
-- tokens and cost to the day, tokens and cost to the month. What was reserved says on which day, in which month and when that
-- was, and its ends in both buckets.
local function give_back(meter, bucket, seconds, at, till)
  -- Who was admitted at a moment is missing for a minute at most; a meter that went away since has forgotten what it was given.
  local given = math.min(seconds, at + 60 - now, till - meter[bucket .. 'b'] - now)
  if given > 0 then
    meter[bucket] = meter[bucket] - given
    meter[bucket .. 'b'] = meter[bucket .. 'b'] + given
  end
end
local function settle(key, a, reserved)
  local words = {}
  for word in string.gmatch(reserved, '%S+') do words[#words + 1] = tonumber(word) end
  local day, month, at, requests_end, tokens_end = unpack(words)
  local meter = read(key)
  take(meter, 'r', a[1])
  take(meter, 't', a[2])
  give_back(meter, 'r', -a[1], at, requests_end)
  give_back(meter, 't', -a[2], at, tokens_end)
  add(meter, day, a[3], a[4], 'd')
  add(meter, month, a[5], a[6], 'm')
  write(key, meter, keep(meter))
end
for i = 1, (#KEYS - 1) / 2 do
  local key, a = KEYS[2 * i - 1], {}
  for j = 1, 6 do a[j] = tonumber(ARGV[1 + (i - 1) * 6 + j]) end
  local reserved = redis.call('HGET', KEYS[#KEYS], ARGV[1] .. ' ' .. key)
  if reserved then
    settle(key, a, reserved)
    redis.call('HDEL', KEYS[#KEYS], ARGV[1] .. ' ' .. key)
  end
  redis.call('ZREM', KEYS[2 * i], ARGV[1])
end
return 0
"""
)

RENEW = """
-- KEYS: leases, ARGV: the seconds of a lease, the second after which it is too late, then for each key the id of a request.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
if now <= tonumber(ARGV[2]) then
  for i, key in ipairs(KEYS) do
    redis.call('ZADD', key, now + tonumber(ARGV[1]), ARGV[i + 2])
    redis.call('EXPIRE', key, math.ceil(tonumber(ARGV[1])) + 1)
  end
end
return math.floor(now * 1000000)
"""


def digest(script: str) -> str:
    """What EVALSHA calls a script."""
    return sha1(script.encode(), usedforsecurity=False).hexdigest()
